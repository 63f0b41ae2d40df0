"""Leased blocks of one owner, read by others: payloads too big for a ring, never copied on the way.

Payload layout: the class table (count, then bytes and number of each class), two u64 words per block (number
of its lease, written by the owner; number of the lease given back, written by the user), then the blocks,
each on a page. A block is free when both words agree, so no word has two writers at one time, and giving
back an old lease late frees nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shm.errors import BadHandle, LayoutMismatch, Poisoned, RecordTooLarge, SlabExhausted
from shm.segment import Segment

__all__ = ["SlabHandle", "SlabOwner", "SlabPool", "SlabStatistics", "SlabUser"]

_LAYOUT = "slab"
_PAGE = 4096
_MOST_CLASSES = 64
_GENERATION_BIT = 32


class SlabHandle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where bytes lie: block, offset into the payload, length, and the block's lease number (0: any)."""

    block: int
    offset: int
    nbytes: int
    lease: int = 0


class SlabStatistics(NamedTuple):
    """Blocks and bytes of blocks; `leases`, `exhausted` and `reclaimed` count since the start."""

    blocks: int
    leased: int
    free_bytes: int
    nbytes: int
    leases: int
    exhausted: int
    reclaimed: int


class SlabPool:
    """The memory of one owner's blocks, of one or more sizes."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        words = segment.words
        if words[0] > _MOST_CLASSES:
            raise LayoutMismatch(f"slab claims {words[0]} block classes: it was overwritten")
        self.classes = tuple((words[1 + 2 * i], words[2 + 2 * i]) for i in range(words[0]))
        self.offsets, self.sizes, end = _blocks(self.classes)
        if end > segment.nbytes:
            raise LayoutMismatch(
                f"slab claims {end} bytes in a segment of {segment.nbytes}: it was overwritten"
            )

    @classmethod
    def create(cls, classes: Sequence[tuple[int, int]], generation: int = 1) -> SlabPool:
        """Blocks of `(bytes of a block, number of blocks)`; sizes are rounded up to whole pages.

        Leases are numbered from the generation on: a handle of one generation names nothing in another.
        """
        merged: dict[int, int] = {}
        for size, count in classes:
            if size < 1 or count < 1:
                raise ValueError(f"a block class has 1 byte and 1 block or more, not {size} and {count}")
            rounded = (size + _PAGE - 1) & -_PAGE
            merged[rounded] = merged.get(rounded, 0) + count
        if not 1 <= len(merged) <= _MOST_CLASSES:
            raise ValueError(f"a slab has 1 to {_MOST_CLASSES} block classes, not {len(merged)}")
        table = tuple(sorted(merged.items()))
        segment = Segment.create(_blocks(table)[2], _LAYOUT, generation=generation)
        segment.words[0] = len(table)
        for i, (size, count) in enumerate(table):
            segment.words[1 + 2 * i] = size
            segment.words[2 + 2 * i] = count
        pool = cls(segment)
        for block in range(len(pool.sizes)):
            at = pool.lease_index(block)
            segment.words[at] = segment.words[at + 1] = generation << _GENERATION_BIT
        return pool

    @classmethod
    def attach(cls, fd: int) -> SlabPool:
        return cls(Segment.attach(fd, _LAYOUT))

    @property
    def generation(self) -> int:
        return self.segment.generation

    def lease_index(self, block: int) -> int:
        """u64 index of a block's lease number; the number given back is the next word."""
        return 1 + 2 * _MOST_CLASSES + 2 * block

    def place(self, handle: SlabHandle) -> memoryview:
        """The bytes a handle names. Raises BadHandle where it names no block or an ended lease."""
        block = handle.block
        if not 0 <= block < len(self.sizes):
            raise BadHandle(f"slab block {block} does not exist: allowed are 0 to {len(self.sizes) - 1}")
        if handle.offset != self.offsets[block] or not 0 <= handle.nbytes <= self.sizes[block]:
            raise BadHandle(
                f"slab handle {handle} does not fit block {block}: "
                f"it has {self.sizes[block]} bytes at {self.offsets[block]}"
            )
        at = self.lease_index(block)
        lease, returned = self.segment.words[at], self.segment.words[at + 1]
        if lease == returned or handle.lease not in (0, lease):
            raise BadHandle(
                f"the lease of slab handle {handle} has ended (block {block} is at lease {lease})"
            )
        return self.segment.buf[handle.offset : handle.offset + handle.nbytes]

    def give_back(self, handle: SlabHandle) -> None:
        self.place(handle)
        at = self.lease_index(handle.block)
        self.segment.words[at + 1] = self.segment.words[at]

    def close(self) -> None:
        self.segment.close()


def _blocks(classes: Sequence[tuple[int, int]]) -> tuple[list[int], list[int], int]:
    """Offset and size of every block, and the end of the last."""
    total = sum(count for _, count in classes)
    at = (8 * (1 + 2 * _MOST_CLASSES + 2 * total) + _PAGE - 1) & -_PAGE
    offsets, sizes = [], []
    for size, count in classes:
        for _ in range(count):
            offsets.append(at)
            sizes.append(size)
            at += size
    return offsets, sizes, at


class SlabOwner:
    """Leases blocks. Over a pool that a dead owner left, it takes over what is leased; `reclaim` frees it."""

    def __init__(self, pool: SlabPool) -> None:
        self.pool = pool
        self._words = pool.segment.words
        self._limits = [size for size, _ in pool.classes]
        self._free: list[list[int]] = []
        self._class: list[int] = []
        self._users: dict[int, str] = {}  # leased block -> who is to give it back
        self._leases = self._exhausted = self._reclaimed = 0
        for number, (_, count) in enumerate(pool.classes):
            self._free.append([])
            for block in range(len(self._class), len(self._class) + count):
                self._class.append(number)
                if self._is_free(block):
                    self._free[number].append(block)
                else:
                    self._users[block] = ""

    def lease(self, nbytes: int, user: str = "") -> SlabHandle:
        """A block of at least `nbytes`, the smallest that is free; `user` names who will give it back.

        Raises SlabExhausted where none is free now, RecordTooLarge where no block is that large; Poisoned.
        """
        if self.pool.segment.poisoned:
            raise Poisoned("slab", self.pool.segment.poisoned)
        if nbytes < 0:
            raise ValueError(f"a lease has 0 bytes or more, not {nbytes}")
        first = bisect_left(self._limits, nbytes)
        if first == len(self._limits):
            raise RecordTooLarge(
                f"{nbytes} bytes do not fit a slab block of {self._limits[-1]}: declare a larger block class"
            )
        if not self._free[first]:
            self.sweep()
        block = self._take(first)
        if block is None:
            self._exhausted += 1
            raise SlabExhausted(
                f"no slab block of {nbytes} bytes is free ({len(self._users)} are leased): "
                "try again when readers have given some back"
            )
        self._users[block] = user
        self._leases += 1
        at = self.pool.lease_index(block)
        lease = self._words[at] = self._words[at] + 1
        return SlabHandle(block, self.pool.offsets[block], nbytes, lease)

    def _take(self, first: int) -> int | None:
        for free in self._free[first:]:
            if free:
                return free.pop()
        return None

    def view(self, handle: SlabHandle) -> memoryview:
        """The leased bytes, writable. Raises BadHandle."""
        return self.pool.place(handle)

    def release(self, handle: SlabHandle) -> None:
        """End a lease from the owner's side: of a block that no user will give back. Raises BadHandle."""
        self.pool.give_back(handle)
        self._settle(handle.block)

    def sweep(self) -> int:
        """Take in the blocks that users gave back; returns how many. `lease` does so when it runs short."""
        returned = [block for block in self._users if self._is_free(block)]
        for block in returned:
            self._settle(block)
        return len(returned)

    def reclaim(self, user: str | None = None) -> int:
        """Free what a dead user will not give back, with None everything leased; returns how many blocks.

        Only once the user is dead: it could still read.
        """
        self.sweep()
        lost = [block for block, name in self._users.items() if user is None or name == user]
        for block in lost:
            at = self.pool.lease_index(block)
            self._words[at + 1] = self._words[at]
            self._settle(block)
        self._reclaimed += len(lost)
        return len(lost)

    def _is_free(self, block: int) -> bool:
        at = self.pool.lease_index(block)
        return self._words[at] == self._words[at + 1]

    def _settle(self, block: int) -> None:
        del self._users[block]
        self._free[self._class[block]].append(block)

    @property
    def free_bytes(self) -> int:
        """Bytes of the blocks that can be leased now."""
        self.sweep()
        return sum(len(free) * size for free, size in zip(self._free, self._limits, strict=True))

    @property
    def leased(self) -> int:
        """Number of blocks leased now."""
        self.sweep()
        return len(self._users)

    def statistics(self) -> SlabStatistics:
        return SlabStatistics(
            blocks=len(self._class),
            leased=self.leased,
            free_bytes=self.free_bytes,
            nbytes=sum(self.pool.sizes),
            leases=self._leases,
            exhausted=self._exhausted,
            reclaimed=self._reclaimed,
        )


class SlabUser:
    """Reads blocks by handle. Exactly one user gives a block back, when nobody will look at it any more."""

    def __init__(self, pool: SlabPool) -> None:
        self.pool = pool

    def view(self, handle: SlabHandle) -> memoryview:
        """The bytes, read-only and not copied; valid until given back. Raises BadHandle."""
        return self.pool.place(handle).toreadonly()

    def give_back(self, handle: SlabHandle) -> None:
        """Let the owner lease the block again. Raises BadHandle, a second time for one lease included."""
        self.pool.give_back(handle)
