"""Shared memory without a name: created, allocated and unlinked at once, then passed on as a descriptor."""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import mmap
import os
import re
import secrets
import sys
from pathlib import Path

import posix_ipc  # type: ignore[import-not-found]

from shm.errors import LayoutMismatch, NoSharedMemory

__all__ = ["HEADER_BYTES", "LINE_BYTES", "Poison", "Segment", "process_start", "sweep"]

HEADER_BYTES = 4096
LINE_BYTES = 128  # two cache lines: the adjacent-line prefetcher pairs them

_MAGIC = int.from_bytes(b"MSTARSHM", "little")
_VERSION = 1
# u64 indices into the header page
_AT_MAGIC, _AT_VERSION, _AT_LAYOUT, _AT_NBYTES, _AT_GENERATION, _AT_CREATOR, _AT_STARTED = range(7)
AT_POISON = 16  # a line of its own: writers look at it with every record
_TEXT_OFFSET, _TEXT_BYTES = 512, 256

_DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"mstar-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


class Poison(enum.IntEnum):
    """Why a segment was given up. Any other non-zero code is its poisoner's own."""

    PEER_LOST = 1
    TORN = 2


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot (proc(5), stat field 22); 0 when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


class Segment:
    """A header page and `nbytes` of zeroed payload, mapped shared and already backed by memory.

    `buf` is the payload as bytes and `words` the same as u64; control words are read and written through
    `words` only, whose aligned loads and stores do not tear. The layout string names what the payload holds,
    with its dimensions; both sides must give the same. Not for use by several threads at once.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, layout: str) -> None:
        self.fd = fd
        self.layout = layout
        self._page = memoryview(mapping)
        self.header = self._page[:HEADER_BYTES].cast("Q")
        self.buf = self._page[HEADER_BYTES:]
        self.words = self.buf.cast("Q")
        self.nbytes = self.buf.nbytes

    @classmethod
    def create(cls, nbytes: int, layout: str, *, generation: int = 1) -> Segment:
        """Allocate, map and unlink a segment of `nbytes` payload bytes, rounded up to whole pages.

        Raises NoSharedMemory, which names the sizes, where /dev/shm cannot hold it: no SIGBUS later.
        """
        if nbytes <= 0:
            raise ValueError(f"a segment needs at least one payload byte, not {nbytes}")
        total = (HEADER_BYTES + nbytes + mmap.PAGESIZE - 1) & -mmap.PAGESIZE
        fd = _allocate(total)
        try:
            segment = cls(fd, _map(fd, total), layout)
        except BaseException:
            os.close(fd)
            raise
        header = segment.header
        text = layout.encode()[:_TEXT_BYTES]
        segment._page[_TEXT_OFFSET : _TEXT_OFFSET + len(text)] = text
        header[_AT_VERSION] = _VERSION
        header[_AT_LAYOUT] = _hash(layout)
        header[_AT_NBYTES] = segment.nbytes
        header[_AT_GENERATION] = generation
        header[_AT_CREATOR] = os.getpid()
        header[_AT_STARTED] = process_start(os.getpid())
        header[_AT_MAGIC] = _MAGIC
        return segment

    @classmethod
    def attach(cls, fd: int, layout: str) -> Segment:
        """Map an inherited or received descriptor and take ownership of it: it is closed on failure too.

        Raises LayoutMismatch where the descriptor holds another layout, version, or no segment at all.
        """
        try:
            total = os.fstat(fd).st_size
            if total <= HEADER_BYTES or total % mmap.PAGESIZE:
                raise LayoutMismatch(
                    f"descriptor {fd} holds {total} bytes, no segment: expected {layout!r}; "
                    "pass the right descriptor"
                )
            os.set_inheritable(fd, False)
            segment = cls(fd, _map(fd, total), layout)
            segment._check()
        except BaseException:
            os.close(fd)
            raise
        return segment

    def _check(self) -> None:
        header = self.header
        if header[_AT_MAGIC] != _MAGIC:
            raise LayoutMismatch(
                f"descriptor {self.fd} has magic {header[_AT_MAGIC]:#x} instead of {_MAGIC:#x}: "
                "it is no segment of ours"
            )
        if header[_AT_VERSION] != _VERSION:
            raise LayoutMismatch(
                f"segment version is {header[_AT_VERSION]}, this program speaks {_VERSION}: "
                "restart everything with one build"
            )
        if header[_AT_LAYOUT] != _hash(self.layout) or header[_AT_NBYTES] != self.nbytes:
            raw = bytes(self._page[_TEXT_OFFSET : _TEXT_OFFSET + _TEXT_BYTES])
            held = raw.rstrip(b"\0").decode(errors="replace")
            raise LayoutMismatch(
                f"segment holds {held!r} in {header[_AT_NBYTES]} bytes, expected {self.layout!r} in "
                f"{self.nbytes}: give both sides the same layout"
            )

    @property
    def generation(self) -> int:
        return self.header[_AT_GENERATION]

    @property
    def creator(self) -> tuple[int, int]:
        """Process id and start time (clock ticks since boot) of who created it."""
        return self.header[_AT_CREATOR], self.header[_AT_STARTED]

    @property
    def poisoned(self) -> int:
        """0 while healthy, else the code that `poison` was given."""
        return self.header[AT_POISON]

    def poison(self, code: int) -> None:
        """Give the segment up for everybody. The first code stays."""
        if code <= 0:
            raise ValueError(f"a poison code is positive, not {code}")
        if not self.header[AT_POISON]:
            self.header[AT_POISON] = code

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped until the last view of it, this object's included, is
        dropped: a reader that is still draining must not lose the ground under it.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def sweep() -> int:
    """Unlink this user's names whose creator died between creating and unlinking; returns how many."""
    count = 0
    try:
        entries = os.listdir(_DIRECTORY)
    except FileNotFoundError:
        return 0
    for entry in entries:
        match = _NAME.fullmatch(entry)
        if match is None or int(match[1]) != os.getuid() or process_start(int(match[2])) == int(match[3]):
            continue
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory("/" + entry)
            count += 1
    return count


def _allocate(total: int) -> int:
    pid = os.getpid()
    name = f"/mstar-{os.getuid()}-{pid}-{process_start(pid)}-{secrets.token_hex(8)}"
    try:
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    except (OSError, posix_ipc.Error) as error:
        raise NoSharedMemory(total, _free(_DIRECTORY), str(error)) from error
    fd: int = memory.fd
    with contextlib.suppress(
        posix_ipc.ExistentialError
    ):  # a sweep in another pid namespace may have been first
        memory.unlink()
    try:
        os.posix_fallocate(fd, 0, total)
    except OSError as error:
        free = _free(fd)
        os.close(fd)
        raise NoSharedMemory(total, free, errno.errorcode.get(error.errno or 0, str(error))) from error
    return fd


def _free(where: int | Path) -> int | None:
    try:
        status = os.statvfs(where)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _map(fd: int, total: int) -> mmap.mmap:
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, total, flags=flags, trackfd=False)
    return mmap.mmap(fd, total, flags=flags)


def _hash(layout: str) -> int:
    return int.from_bytes(hashlib.blake2b(layout.encode(), digest_size=8).digest(), "little")
