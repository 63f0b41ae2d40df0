"""Segments: nameless, allocated, checked on attach."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from shm.errors import LayoutMismatch, NoSharedMemory
from shm.segment import Segment, process_start, sweep


def names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"mstar-{os.getuid()}-{os.getpid()}-")}


@pytest.mark.behaviour("F-07", "F-09")
def test_a_segment_has_no_name_once_it_is_created() -> None:
    segment = Segment.create(1 << 16, "test")
    assert names() == set()
    assert os.stat(segment.fd).st_nlink == 0
    segment.close()


def test_a_segment_is_private_to_its_user_and_not_inherited() -> None:
    segment = Segment.create(1, "test")
    assert os.stat(segment.fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(segment.fd)
    segment.close()


def test_what_one_side_writes_the_other_reads() -> None:
    ours = Segment.create(8192, "test", generation=7)
    theirs = Segment.attach(os.dup(ours.fd), "test")
    ours.words[3] = 42
    assert theirs.words[3] == 42
    assert (theirs.generation, theirs.nbytes) == (7, ours.nbytes)
    assert theirs.creator == (os.getpid(), process_start(os.getpid()))
    ours.close()
    theirs.close()


def test_the_first_poison_is_seen_by_everybody_and_stays() -> None:
    ours = Segment.create(8, "test")
    theirs = Segment.attach(os.dup(ours.fd), "test")
    assert ours.poisoned == 0
    theirs.poison(3)
    ours.poison(4)
    assert ours.poisoned == theirs.poisoned == 3
    with pytest.raises(ValueError, match="positive"):
        ours.poison(0)
    ours.close()
    theirs.close()


def test_another_layout_is_refused_and_both_are_named() -> None:
    segment = Segment.create(8, "rows=64")
    fd = os.dup(segment.fd)
    with pytest.raises(LayoutMismatch, match=r"'rows=64'.*'rows=128'"):
        Segment.attach(fd, "rows=128")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    segment.close()


@pytest.mark.parametrize(("word", "what"), [(0, "magic"), (1, "version"), (3, "bytes")])
def test_a_damaged_header_is_refused(word: int, what: str) -> None:
    segment = Segment.create(8, "test")
    segment.header[word] += 1
    with pytest.raises(LayoutMismatch, match=what):
        Segment.attach(os.dup(segment.fd), "test")
    segment.close()


def test_a_descriptor_of_something_else_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="no segment"):
        Segment.attach(os.memfd_create("other"), "test")


def test_views_outlive_the_close() -> None:
    segment = Segment.create(8, "test")
    words = segment.words
    segment.close()
    segment.close()
    words[0] = 1
    assert words[0] == 1


def test_an_empty_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Segment.create(0, "test")


@pytest.mark.behaviour("F-11")
def test_a_full_filesystem_is_an_error_that_names_the_sizes_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoSharedMemory, match=r"\(9 MiB\) is needed.*--shm-size=.*--ipc=host") as caught:
        Segment.create(8 << 20, "test")
    assert caught.value.needed == (8 << 20) + 4096
    assert len(os.listdir("/proc/self/fd")) == before
    assert names() == set()


@pytest.mark.behaviour("F-11")
def test_a_small_tmpfs_is_an_error_at_start_and_not_a_bus_error_later() -> None:
    script = """
        import os
        from shm.errors import NoSharedMemory
        from shm.segment import Segment
        Segment.create(256 << 10, "fits").buf[:] = bytes(256 << 10)
        try:
            Segment.create(4 << 20, "too big")
        except NoSharedMemory as error:
            print(error.needed, error.free, error)
    """
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, sys.executable, textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=15)
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    needed, free = done.stdout.split()[:2]
    assert int(needed) == (4 << 20) + 4096
    assert 0 < int(free) < 1 << 20
    assert "--ipc=host" in done.stdout


@pytest.mark.behaviour("F-07")
def test_a_sweep_removes_the_name_of_a_creator_that_was_killed_before_unlinking() -> None:
    script = """
        import os, signal
        from unittest.mock import patch
        import posix_ipc
        from shm.segment import Segment

        real = posix_ipc.SharedMemory

        def create(name, *args, **options):
            real(name, *args, **options)
            print(name, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        with patch("shm.segment.posix_ipc.SharedMemory", create):
            Segment.create(4096, "test")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=15,
    )
    assert done.returncode == -signal.SIGKILL
    name = done.stdout.strip().lstrip("/")
    assert name in os.listdir("/dev/shm")
    assert sweep() >= 1
    assert name not in os.listdir("/dev/shm")


@pytest.mark.behaviour("F-07", "F-09")
def test_a_sweep_leaves_names_of_the_living_and_of_others_alone() -> None:
    start = process_start(os.getpid())
    kept = [f"/dev/shm/mstar-{os.getuid()}-{os.getpid()}-{start}-ab", "/dev/shm/mstar-other"]
    try:
        for path in kept:
            with open(path, "xb"):
                pass
        sweep()
        assert all(os.path.exists(path) for path in kept)
    finally:
        for path in kept:
            os.unlink(path)


def test_a_reused_process_id_is_told_from_the_old_process_by_its_start() -> None:
    path = f"/dev/shm/mstar-{os.getuid()}-{os.getpid()}-{process_start(os.getpid()) + 1}-ab"
    with open(path, "xb"):
        pass
    sweep()
    assert not os.path.exists(path)


def test_a_process_that_is_gone_has_no_start() -> None:
    assert process_start(2**22 + 1) == 0
