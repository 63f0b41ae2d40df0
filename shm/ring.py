"""A byte ring from one writer to one reader.

Payload layout: three 128-byte lines (0: head; 1: tail; 2: capacity, reserved room and the writer's wish for
room), then data from the next page on. Positions are byte counts that only grow. A record is one u64 (length
in the low half, its position in units of 64 in the high half) and its bytes, padded to 64, never split: where
it does not fit before the end, a marker sends the reader back to the start. Data goes first, then the
record's word, then the head: x86-64 keeps that order for plain stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from shm.doorbell import Doorbell
from shm.errors import LayoutMismatch, Poisoned, RecordTooLarge, TornRecord
from shm.fence import fence
from shm.segment import AT_POISON, Poison, Segment
from shm.wait import Bell

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Ring", "RingReader", "RingReaderStatistics", "RingWriter", "RingWriterStatistics"]

_LAYOUT = "ring"
_HEAD, _TAIL, _CAPACITY, _RESERVED, _WISH = 0, 16, 32, 33, 40  # u64 indices
_DATA = 4096
_WRAP = (1 << 64) - 1
_LOW = 0xFFFFFFFF
_LEAST_CAPACITY = 4096


class RingWriterStatistics(NamedTuple):
    """`nbytes` counts ring bytes written so far, record words and padding too; `used` those unread now."""

    records: int
    nbytes: int
    refused: int
    rings: int
    used: int
    capacity: int


class RingReaderStatistics(NamedTuple):
    """As the writer's: `pending` are ring bytes not yet released."""

    records: int
    nbytes: int
    pending: int
    capacity: int


class Ring:
    """The memory of one ring. `reserved` bytes of it are for control records only, a quarter at most."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.capacity = segment.words[_CAPACITY]
        self.reserved = segment.words[_RESERVED]
        if segment.nbytes < _DATA + self.capacity or self.capacity & (self.capacity - 1):
            raise LayoutMismatch(
                f"ring claims {self.capacity} bytes in a segment of {segment.nbytes}: it was overwritten"
            )

    @classmethod
    def create(cls, capacity: int, *, reserved: int = 65536, generation: int = 1) -> Ring:
        """A ring of `capacity` data bytes, a power of two; `reserved` is cut to a quarter of them."""
        if capacity < _LEAST_CAPACITY or capacity & (capacity - 1):
            raise ValueError(f"a ring's capacity is a power of two from {_LEAST_CAPACITY} on, not {capacity}")
        if reserved < 0:
            raise ValueError(f"a ring's reserved room is 0 bytes or more, not {reserved}")
        segment = Segment.create(_DATA + capacity, _LAYOUT, generation=generation)
        segment.words[_CAPACITY] = capacity
        segment.words[_RESERVED] = min(reserved, capacity // 4) & -64
        return cls(segment)

    @classmethod
    def attach(cls, fd: int) -> Ring:
        return cls(Segment.attach(fd, _LAYOUT))

    @property
    def generation(self) -> int:
        return self.segment.generation

    def close(self) -> None:
        self.segment.close()


class RingWriter:
    """The one writer. A record it refuses must be offered again before later ones, or order is lost.

    Control records are taken while those unread, gaps at the ring's end included, fit the reserved room.
    """

    __slots__ = (
        "_capacity",
        "_data",
        "_head",
        "_header",
        "_largest",
        "_limit",
        "_mask",
        "_notify",
        "_records",
        "_tail",
        "_words",
        "bell",
        "refused",
        "ring",
    )

    def __init__(self, ring: Ring, bell: Bell | None) -> None:
        self.ring = ring
        self.bell = bell
        self._notify = None if bell is None else bell.notify
        segment = ring.segment
        self._header = segment.header
        self._words = segment.words
        self._data = segment.buf[_DATA : _DATA + ring.capacity]
        self._capacity = ring.capacity
        self._limit = ring.capacity - ring.reserved
        self._mask = ring.capacity - 1
        self._largest = ring.capacity // 4
        self._head = segment.words[_HEAD]
        self._tail = segment.words[_TAIL]
        self._records = 0
        self.refused = 0

    def send(self, payload: bytes | bytearray | memoryview, *, control: bool = False) -> bool:
        """Append one record of bytes; False where there is no room now.

        Data may not use the reserved room, control records may. After a refusal the reader, if it was given
        the writer's doorbell, rings it once it has emptied the ring. Raises RecordTooLarge over a quarter of
        the capacity, and Poisoned.
        """
        n = len(payload)
        size = (n + 71) & -64
        head = self._head
        place = head & self._mask
        if (
            head + size - self._tail > (self._capacity if control else self._limit)
            or place + size > self._capacity
            or n > self._largest
            or self._header[AT_POISON]
        ):
            place = self._place(n, control)
            if place < 0:
                return False
            head = self._head
        self._data[place + 8 : place + 8 + n] = payload
        words = self._words
        words[(_DATA + place) >> 3] = n | (head >> 6 & _LOW) << 32
        self._head = words[_HEAD] = head + size
        self._records += 1
        if self._notify is not None:
            self._notify()
        return True

    def send_parts(self, parts: Sequence[Buffer], *, control: bool = False) -> bool:
        """`send` of C-contiguous parts' bytes, one after the other, copied straight into the ring."""
        views = [memoryview(part) for part in parts]
        n = 0
        for view in views:
            n += view.nbytes
        place = self._place(n, control)
        if place < 0:
            return False
        data = self._data
        at = place + 8
        for view in views:
            size = view.nbytes
            if size:
                data[at : at + size] = view.cast("B")
                at += size
        self._publish(place, n)
        return True

    def _place(self, n: int, control: bool) -> int:
        """Offset for a record of `n` bytes, -1 where there is no room; leaves a gap at the end if need be."""
        if n > self._largest:
            raise RecordTooLarge(
                f"a record of {n} bytes exceeds {self._largest}, a quarter of the ring: "
                "send it by a slab or enlarge the ring"
            )
        if self._header[AT_POISON]:
            raise Poisoned("ring", self._header[AT_POISON])
        size = (n + 71) & -64
        head = self._head
        offset = head & self._mask
        left = self._capacity - offset
        total = size if size <= left else left + size
        limit = self._capacity if control else self._limit
        if head + total - self._tail > limit:
            self._tail = self._words[_TAIL]
            if head + total - self._tail > limit and not self._wish(head + total - limit):
                return -1
        if total != size:
            self._words[(_DATA + offset) >> 3] = _WRAP
            self._head = head + left
            return 0
        return offset

    def _publish(self, place: int, n: int) -> None:
        words = self._words
        head = self._head
        self._records += 1
        words[(_DATA + place) >> 3] = n | (head >> 6 & _LOW) << 32
        self._head = words[_HEAD] = head + ((n + 71) & -64)
        if self._notify is not None:
            self._notify()

    def _wish(self, tail: int) -> bool:
        """Ask to be rung when the ring is empty, then look again whether the reader has come to `tail`."""
        words = self._words
        words[_WISH] += 1
        fence()
        self._tail = words[_TAIL]
        if self._tail >= tail:
            return True
        self.refused += 1
        return False

    @property
    def room(self) -> int:
        """Ring bytes that data records may take now; a record takes its length and 8, rounded up to 64."""
        self._tail = self._words[_TAIL]
        return max(0, self._limit - (self._head - self._tail))

    def statistics(self) -> RingWriterStatistics:
        rings = 0 if self.bell is None else self.bell.rings
        used = self._head - self._words[_TAIL]
        return RingWriterStatistics(self._records, self._head, self.refused, rings, used, self._capacity)


class RingReader:
    """The one reader. `doorbell`, the writer's, is rung once the ring is empty after a refusal."""

    __slots__ = (
        "_answered",
        "_capacity",
        "_data",
        "_doorbell",
        "_end",
        "_head",
        "_mask",
        "_records",
        "_tail",
        "_words",
        "ring",
    )

    def __init__(self, ring: Ring, doorbell: Doorbell | None = None) -> None:
        self.ring = ring
        segment = ring.segment
        self._words = segment.words
        self._data = segment.buf[_DATA : _DATA + ring.capacity].toreadonly()
        self._capacity = ring.capacity
        self._mask = ring.capacity - 1
        self._doorbell = doorbell
        self._answered = 0
        self._head = self._tail = self._end = segment.words[_TAIL]
        self._records = 0

    def has_data(self) -> bool:
        return self._words[_HEAD] != self._tail

    def peek(self) -> memoryview | None:
        """The next record, read-only, until `release`; None where there is none.

        Raises TornRecord, and poisons the ring, where the record is not the one that is due.
        """
        tail = self._tail
        words = self._words
        head = self._head = words[_HEAD]
        if head == tail:
            return None
        offset = tail & self._mask
        word = words[(_DATA + offset) >> 3]
        if word == _WRAP:
            tail += self._capacity - offset
            offset = 0
            word = words[_DATA >> 3]
        n = word & _LOW
        end = tail + ((n + 71) & -64)
        if word >> 32 != tail >> 6 & _LOW or end > head or offset + 8 + n > self._capacity:
            raise self._torn(tail, word, head)
        self._end = end
        return self._data[offset + 8 : offset + 8 + n]

    def release(self) -> None:
        """Free the record that `peek` gave; views of it are invalid from now on."""
        end = self._end
        if end == self._tail:
            raise RuntimeError("release() without a peeked record: call peek() first")
        self._records += 1
        self._tail = self._words[_TAIL] = end
        if end == self._head and self._doorbell is not None:
            self._grant(self._doorbell)

    def _grant(self, doorbell: Doorbell) -> None:
        fence()
        wish = self._words[_WISH]
        if wish != self._answered:
            self._answered = wish
            doorbell.ring()

    def _torn(self, tail: int, word: int, head: int) -> TornRecord:
        self.ring.segment.poison(Poison.TORN)
        return TornRecord(
            f"ring record at {tail} carries position {word >> 32} and length {word & _LOW}, due is position "
            f"{tail >> 6 & _LOW} and an end by {head}: the ring is poisoned, restart its writer"
        )

    def statistics(self) -> RingReaderStatistics:
        return RingReaderStatistics(
            self._records, self._tail, self._words[_HEAD] - self._tail, self._capacity
        )
