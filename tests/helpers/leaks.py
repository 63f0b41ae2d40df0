"""What a test may not leave behind: processes, names in /dev/shm, threads that keep the interpreter alive.

Every process that a test starts inherits one variable of its environment, also through a double fork, and is
recognised by it; what other programs on the machine do meanwhile is not the test's fault.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VARIABLE = "MSTAR_TEST_SUITE"
# Helpers of the standard library that live as long as the interpreter.
_LASTING = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


class Trace(NamedTuple):
    """What exists at one moment: process ids, names in /dev/shm, living non-daemon threads."""

    pids: frozenset[int]
    names: frozenset[str]
    threads: frozenset[threading.Thread]


def mark() -> None:
    """Set the variable that later children inherit, once per run."""
    os.environ.setdefault(VARIABLE, uuid.uuid4().hex)


def _pids() -> frozenset[int]:
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())


def trace() -> Trace:
    threads = frozenset(t for t in threading.enumerate() if not t.daemon)
    return Trace(_pids(), frozenset(os.listdir("/dev/shm")), threads)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _parent_and_state(pid: int) -> tuple[int, str]:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return (int(fields[1]), fields[0].decode()) if len(fields) > 1 else (0, "X")


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid, _ = _parent_and_state(pid)
        yield pid


def _ours(pid: int, known: frozenset[int]) -> bool:
    """Whether this process came from the current test rather than from a daemon of a wider fixture."""
    parent, state = _parent_and_state(pid)
    me = os.getpid()
    if state == "X" or (state == "Z" and parent != me):
        return False
    if any(word in _read(pid, "cmdline") for word in _LASTING):
        return False
    above = {me, *_ancestors(me)}
    for ancestor in _ancestors(pid):
        if ancestor in above:
            # An orphan hangs below init or another reaper, whose other children are nobody's business.
            marked = f"{VARIABLE}={os.environ.get(VARIABLE, '-')}".encode()
            return ancestor == me or marked in _read(pid, "environ").split(b"\0")
        if ancestor in known:
            return False
    return False


def _mine(name: str) -> bool:
    try:
        return os.stat(f"/dev/shm/{name}").st_uid == os.getuid()
    except OSError:
        return False


def leftovers(before: Trace, *, grace: float = 2.0) -> list[str]:
    """What appeared since `before` and is still there after `grace` seconds, a sentence each.

    A name alone gets four times as long: it does not tell who made it, and another suite on this machine may
    be about to remove it.
    """
    start = time.monotonic()
    while True:
        now = trace()
        pids = sorted(pid for pid in now.pids - before.pids if _ours(pid, before.pids))
        names = sorted(name for name in now.names - before.names if _mine(name))
        threads = sorted(t.name for t in now.threads - before.threads if t.is_alive())
        patience = grace if pids or threads else 4 * grace
        if not (pids or names or threads) or time.monotonic() >= start + patience:
            break
        time.sleep(0.02)
    found = [
        f"process {p}: {_read(p, 'cmdline').replace(bytes(1), b' ').decode(errors='replace') or 'zombie'}"
        for p in pids
    ]
    found += [f"shared memory /dev/shm/{name}" for name in names]
    found += [f"non-daemon thread {name!r}" for name in threads]
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return found
