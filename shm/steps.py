"""A cell's step ring: fixed slots, one writer, N readers, N may be 0.

Payload layout: 128-byte lines (0: head; 1 + i: done word and error word of reader i), 1 KiB of error text per
reader, then the slots from a page on. A slot is a header of 16 u64 words, whose first is the commit word, and
the columns of a step as raw aligned arrays, then a tail for the variable part. Step `s` lies in slot
`(s - 1) % slots`; its commit word is `s` once it is whole, then the head says so, then the bells ring.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shm.errors import Poisoned, RingStuck, TornRecord
from shm.fence import fence
from shm.segment import AT_POISON, LINE_BYTES, Poison, Segment
from shm.wait import Bell

__all__ = [
    "StepLayout",
    "StepReader",
    "StepReaderStatistics",
    "StepRing",
    "StepSlot",
    "StepWriter",
    "StepWriterStatistics",
]

_HEADER_WORDS = 16
_ROW_COLUMNS = 10
_GRANT_COLUMNS = 3
_ERROR_BYTES = 1024
_PAGE = 4096
_HEAD = 0  # u64 index


class StepLayout(NamedTuple):
    """Capacity of a slot (rows, grants, bytes of tail), number of slots, number of readers."""

    max_rows: int
    max_grants: int
    tail_bytes: int
    slots: int
    readers: int


class StepWriterStatistics(NamedTuple):
    """The last committed step, the slots, how many steps each reader is behind, how often a bell was rung."""

    step: int
    slots: int
    behind: tuple[int, ...]
    rings: int


class StepReaderStatistics(NamedTuple):
    """The last finished step and how many committed ones wait."""

    done: int
    pending: int


class StepSlot:
    """Views of one slot, built once: no per-step allocation.

    header: u64 [16], word 0 belongs to the ring, 1 to 15 to the record. request: int64 [max_rows].
    rows: int32 [10, max_rows]. grants: int32 [3, max_grants]. drops: int64 [max_rows]. tail: bytes.
    A slot's content is valid for a reader until `StepReader.done`.
    """

    __slots__ = ("drops", "grants", "header", "request", "rows", "tail")

    def __init__(self, payload: memoryview, offset: int, layout: StepLayout) -> None:
        places, _ = _plan(layout)
        rows, grants = layout.max_rows, layout.max_grants

        def column(place: int, dtype: type, count: int) -> NDArray[np.generic]:
            return np.frombuffer(payload, dtype, count, offset + place)

        self.header: memoryview = payload[offset : offset + 8 * _HEADER_WORDS].cast("Q")
        self.request: NDArray[np.int64] = np.frombuffer(payload, np.int64, rows, offset + places[0])
        self.rows: NDArray[np.int32] = np.frombuffer(
            payload, np.int32, _ROW_COLUMNS * rows, offset + places[1]
        ).reshape(_ROW_COLUMNS, rows)
        self.grants: NDArray[np.int32] = np.frombuffer(
            payload, np.int32, _GRANT_COLUMNS * grants, offset + places[2]
        ).reshape(_GRANT_COLUMNS, grants)
        self.drops: NDArray[np.int64] = np.frombuffer(payload, np.int64, rows, offset + places[3])
        self.tail: memoryview = payload[offset + places[4] : offset + places[4] + layout.tail_bytes]


def _plan(layout: StepLayout) -> tuple[tuple[int, ...], int]:
    """Offsets of request, rows, grants, drops and tail in a slot, each on a cache line; bytes of a slot."""
    sizes = (
        8 * _HEADER_WORDS,
        8 * layout.max_rows,
        4 * _ROW_COLUMNS * layout.max_rows,
        4 * _GRANT_COLUMNS * layout.max_grants,
        8 * layout.max_rows,
        layout.tail_bytes,
    )
    places = []
    at = 0
    for size in sizes:
        places.append(at)
        at += (size + 63) & -64
    return tuple(places[1:]), (at + _PAGE - 1) & -_PAGE


class StepRing:
    """The memory of a step ring."""

    def __init__(self, segment: Segment, layout: StepLayout) -> None:
        self.segment = segment
        self.layout = layout

    @classmethod
    def create(cls, layout: StepLayout, generation: int = 1) -> StepRing:
        _check(layout)
        _, slot_bytes = _plan(layout)
        nbytes = _slots_offset(layout) + layout.slots * slot_bytes
        return cls(Segment.create(nbytes, _name(layout), generation=generation), layout)

    @classmethod
    def attach(cls, fd: int, layout: StepLayout) -> StepRing:
        """Takes ownership of the descriptor. Raises LayoutMismatch unless it was created with this layout."""
        _check(layout)
        return cls(Segment.attach(fd, _name(layout)), layout)

    @property
    def generation(self) -> int:
        return self.segment.generation

    def slots(self) -> list[StepSlot]:
        """Fresh views of every slot."""
        _, slot_bytes = _plan(self.layout)
        start = _slots_offset(self.layout)
        return [
            StepSlot(self.segment.buf, start + i * slot_bytes, self.layout) for i in range(self.layout.slots)
        ]

    def done_index(self, reader: int) -> int:
        """u64 index of a reader's done word; its error word is the next."""
        return LINE_BYTES * (1 + reader) // 8

    def error_text(self, reader: int) -> memoryview:
        start = LINE_BYTES * (1 + self.layout.readers) + _ERROR_BYTES * reader
        return self.segment.buf[start : start + _ERROR_BYTES]

    def close(self) -> None:
        self.segment.close()


def _check(layout: StepLayout) -> None:
    if (
        layout.max_rows < 1
        or layout.slots < 1
        or min(layout.max_grants, layout.tail_bytes, layout.readers) < 0
    ):
        raise ValueError(f"{layout}: rows and slots are 1 or more, grants, tail bytes and readers 0 or more")


def _name(layout: StepLayout) -> str:
    sizes = " ".join(f"{name}={value}" for name, value in layout._asdict().items())
    return f"steps header={_HEADER_WORDS} rows={_ROW_COLUMNS} grants={_GRANT_COLUMNS} {sizes}"


def _slots_offset(layout: StepLayout) -> int:
    head = LINE_BYTES * (1 + layout.readers) + _ERROR_BYTES * layout.readers
    return (head + _PAGE - 1) & -_PAGE


class StepWriter:
    """The leader's side. `bells[i]` wakes reader i; `clock` (monotonic ns) only dates what is late."""

    def __init__(
        self, ring: StepRing, bells: Sequence[Bell], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        if len(bells) != ring.layout.readers:
            raise ValueError(
                f"a step ring of {ring.layout.readers} readers needs as many bells, not {len(bells)}"
            )
        self.ring = ring
        self.bells = tuple(bells)
        self._clock = clock
        self._words = ring.segment.words
        self._header = ring.segment.header
        self._count = ring.layout.slots
        self._slots = ring.slots()
        self._commits = [slot.header for slot in self._slots]
        self._dates = [0] * self._count
        self._done = [ring.done_index(i) for i in range(ring.layout.readers)]
        self._rouse = [bell.rouse for bell in bells]
        self._step = self._words[_HEAD]
        self._begun = 0
        self._floor = self._step if not bells else min(self._words[i] for i in self._done)

    def begin(self, seq: int) -> StepSlot:
        """The slot to fill for step `seq`: one more than the last committed, 1 at first.

        Raises RingStuck, which names the reader that is as many steps behind as there are slots; Poisoned.
        """
        if seq != self._step + 1:
            raise ValueError(f"step {seq} does not follow step {self._step}: begin {self._step + 1}")
        if self._header[AT_POISON]:
            raise Poisoned("step ring", self._header[AT_POISON])
        if seq - self._count > self._floor:
            self._wait_none(seq)
        place = (seq - 1) % self._count
        self._commits[place][0] = 0
        self._begun = seq
        return self._slots[place]

    def commit(self, seq: int) -> None:
        """Publish what was begun: commit word, head, fence, and the bells of those who sleep."""
        if seq != self._begun:
            raise ValueError(f"step {seq} was not begun (last begun: {self._begun}): call begin({seq}) first")
        place = (seq - 1) % self._count
        self._begun = 0
        self._step = seq
        self._commits[place][0] = seq
        self._words[_HEAD] = seq
        if self._rouse:
            fence()
            for rouse in self._rouse:
                rouse()
        self._dates[place] = self._clock()

    def _wait_none(self, seq: int) -> None:
        """Read the done words anew. No more than depth + 1 steps fly, so a full ring is a stuck reader."""
        if not self._done:
            self._floor = self._step
            return
        done = [self._words[i] for i in self._done]
        self._floor = min(done)
        if seq - self._count <= self._floor:
            return
        reader = done.index(self._floor)
        now = self._clock()
        line = self.bells[reader].line
        age = (now - self._dates[self._floor % self._count]) / 1e9
        silent = (now - line.beat) / 1e9 if line.beat else None
        stage = line.stage_name or str(line.stage)
        raise RingStuck(reader, self._floor, self._step - self._floor, stage, age, silent)

    def done(self, reader: int) -> int:
        """The last step this reader has finished, 0 at first."""
        return self._words[self._done[reader]]

    def error(self, reader: int) -> str | None:
        """What this reader has failed with, None while it has not."""
        length = self._words[self._done[reader] + 1]
        if not length:
            return None
        return bytes(self.ring.error_text(reader)[: length - 1]).decode(errors="replace")

    def statistics(self) -> StepWriterStatistics:
        behind = tuple(self._step - self._words[i] for i in self._done)
        return StepWriterStatistics(self._step, self._count, behind, sum(bell.rings for bell in self.bells))


class StepReader:
    """One reader's side. `bell`, the leader's, is notified of every done word and of the error."""

    def __init__(self, ring: StepRing, index: int, bell: Bell | None = None) -> None:
        if not 0 <= index < ring.layout.readers:
            raise IndexError(f"reader {index} of a step ring of {ring.layout.readers}")
        self.ring = ring
        self.index = index
        self._bell = bell
        self._words = ring.segment.words
        self._at = ring.done_index(index)
        self._count = ring.layout.slots
        self._slots = ring.slots()
        self._commits = [slot.header for slot in self._slots]
        self.next = self._words[self._at] + 1

    def has_data(self) -> bool:
        return self._words[_HEAD] >= self.next

    def peek(self) -> StepSlot | None:
        """The slot of step `next`, valid until `done`; None where it is not committed yet.

        Raises TornRecord, and poisons the ring, where the slot's commit word is not `next`.
        """
        seq = self.next
        if self._words[_HEAD] < seq:
            return None
        place = (seq - 1) % self._count
        found = self._commits[place][0]
        if found != seq:
            self.ring.segment.poison(Poison.TORN)
            raise TornRecord(
                f"step slot {place} has commit word {found}, due is step {seq}: "
                "the ring is poisoned, restart the cell"
            )
        return self._slots[place]

    def done(self) -> None:
        """Step `next` is finished here: its slot may be used again. Its views are invalid from now on."""
        if self._words[_HEAD] < self.next:
            raise RuntimeError(f"step {self.next} is not committed yet: call peek() first")
        self._words[self._at] = self.next
        self.next += 1
        if self._bell is not None:
            self._bell.notify()

    def fail(self, message: str) -> None:
        """Post an error for the leader, cut to 1 KiB of UTF-8. The first one stays."""
        if self._words[self._at + 1]:
            return
        text = message.encode()[:_ERROR_BYTES].decode(errors="ignore").encode()
        self.ring.error_text(self.index)[: len(text)] = text
        self._words[self._at + 1] = len(text) + 1
        if self._bell is not None:
            self._bell.notify()

    def statistics(self) -> StepReaderStatistics:
        return StepReaderStatistics(self.next - 1, max(0, self._words[_HEAD] - self.next + 1))
