"""Listening sockets, their lock, and what somebody in the way is told."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from mstar.config.paths import lock_file, lock_owner
from mstar.config.schema import Listen
from mstar.daemon import paths, sockets
from mstar.daemon.paths import SocketLock
from mstar.daemon.sockets import CannotListen, InUse, Sockets, port_holder


def on(path: Path, **options: object) -> Sockets:
    return Sockets(Listen(uds=str(path), port=0, **options), {})  # type: ignore[arg-type]


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def test_both_listen_and_the_unix_socket_is_the_users_alone(tmp_path: Path) -> None:
    with on(tmp_path / "s") as found:
        assert connects(tmp_path / "s")
        assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600
        assert found.url == f"http://127.0.0.1:{found.port}"
        with socket.create_connection(("127.0.0.1", found.port or 0)):
            pass
        assert lock_owner(tmp_path / "s") == os.getpid()
    assert list(tmp_path.iterdir()) == []
    assert lock_owner(tmp_path / "s") is None


@pytest.mark.behaviour("F-09")
def test_a_second_instance_on_the_socket_is_told_who_has_it(tmp_path: Path) -> None:
    with on(tmp_path / "s"):
        with pytest.raises(InUse, match=f"socket {tmp_path}/s is in use by process {os.getpid()}"):
            on(tmp_path / "s")
        assert connects(tmp_path / "s")


@pytest.mark.behaviour("F-09")
def test_a_second_instance_on_the_port_is_told_who_has_it(tmp_path: Path) -> None:
    with on(tmp_path / "a") as first:
        with pytest.raises(
            InUse, match=rf"port {first.port} of 127\.0\.0\.1 is in use by process {os.getpid()} \("
        ):
            Sockets(Listen(uds=str(tmp_path / "b"), port=first.port or 0), {})
        assert not lock_file(tmp_path / "b").exists()


@pytest.mark.behaviour("F-07")
def test_the_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "s"))
    stale.close()
    lock_file(tmp_path / "s").write_text("1\n")
    with on(tmp_path / "s"):
        assert connects(tmp_path / "s")


def test_the_socket_of_another_program_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_DYING", 0.0)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        with pytest.raises(InUse, match="in use by another program"):
            on(tmp_path / "s")
        assert connects(tmp_path / "s")


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(CannotListen, match="is not a socket"):
        on(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "precious"


def test_a_path_too_long_and_a_missing_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(CannotListen, match="at most 107"):
        on(tmp_path / ("x" * 120))
    with pytest.raises(CannotListen, match="No such file or directory"):
        on(tmp_path / "none" / "s")


def test_the_default_folder_is_made_private_and_an_open_one_refused(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with Sockets(Listen(tcp=False), env) as found:
        assert found.path == tmp_path / "mstar/mstar.sock"
        assert (found.url, found.port) == (None, None)
        assert stat.S_IMODE(os.stat(found.path.parent).st_mode) == 0o700
    (tmp_path / "mstar").chmod(0o777)
    with pytest.raises(CannotListen, match="mode 0777"):
        Sockets(Listen(tcp=False), env)


def test_a_planted_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mstar").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotListen, match="not a real directory"):
        Sockets(Listen(tcp=False), {"XDG_RUNTIME_DIR": str(tmp_path)})
    lock_file(tmp_path / "s").symlink_to(tmp_path / "victim")
    with pytest.raises(CannotListen):
        on(tmp_path / "s")
    assert not (tmp_path / "victim").exists()


def test_a_host_that_is_not_ours_is_told() -> None:
    with pytest.raises(CannotListen, match=re.escape("cannot listen on 192.0.2.1")):
        Sockets(Listen(host="192.0.2.1", port=0, uds="/tmp/mstar-test-host.sock"), {})


@pytest.mark.parametrize("host", ["a" * 300, "a..b"])
def test_a_host_that_is_no_name_is_told(tmp_path: Path, host: str) -> None:
    with pytest.raises(CannotListen, match="not a host name"):
        Sockets(Listen(host=host, port=0, uds=str(tmp_path / "s")), {})


def test_a_socket_that_was_replaced_under_us_is_not_removed(tmp_path: Path) -> None:
    found = on(tmp_path / "s")
    (tmp_path / "s").unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        found.close()
        assert (tmp_path / "s").exists()


def test_the_holder_of_a_port_is_who_opened_it_not_who_inherited_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(server.fileno(),)):
            assert (port_holder(port) or "").startswith(f"process {os.getpid()} (")
    assert port_holder(port) is None


def test_a_lock_on_a_file_that_its_last_holder_removed_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []

    def removing(fd: int, operation: int) -> None:
        if not removed:
            removed.append(lock_file(tmp_path / "s"))
            removed[0].unlink()
        fcntl.flock(fd, operation)

    monkeypatch.setattr(paths, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": removing}))
    lock = SocketLock(tmp_path / "s")
    assert lock_owner(tmp_path / "s") == os.getpid()
    lock.release()


@pytest.mark.behaviour("F-09")
def test_of_starts_that_race_for_a_socket_one_wins(tmp_path: Path) -> None:
    # The lock belongs to an open file, so threads race for it as processes do.
    together = threading.Barrier(4)

    def race(_: int) -> SocketLock | None:
        together.wait()
        try:
            return SocketLock(tmp_path / "s")
        except InUse:
            return None

    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            (won,) = [lock for lock in pool.map(race, range(4)) if lock is not None]
            won.release()
