"""Channels between actors: bounded, ordered inside one, delayed and so reordered across them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Generic, TypeVar

import numpy as np

from mstar.simulation.clock import VirtualClock
from mstar.simulation.invariants import Broken
from shm.errors import SlabExhausted
from shm.slab import SlabHandle
from shm.steps import StepLayout, StepSlot

__all__ = ["Channel", "Delay", "VirtualSlab", "VirtualStepReader", "VirtualSteps"]

Record = TypeVar("Record")

_LINE = 64
_ALIGNED_PARTS = 6


class Delay:
    """Draws delays of up to ``most_ns``: mostly short ones, now and then a long one."""

    def __init__(self, random: Random, most_ns: int) -> None:
        self._draw = random.random
        self._most = most_ns

    def draw(self) -> int:
        """The next delay in nanoseconds."""
        if not self._most:
            return 0
        share = self._draw()
        return int(self._most * share * share * share)


class Channel(Generic[Record]):
    """At most ``capacity`` records on their way. ``on_record`` and ``on_room`` wake who reads and writes."""

    def __init__(
        self,
        clock: VirtualClock,
        delay: Delay,
        capacity: int,
        on_record: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._delay = delay
        self._capacity = capacity
        self._on_record = on_record
        self._on_room = on_room
        self._records: deque[tuple[int, Record]] = deque()
        self._refused = False
        self._last = 0
        self.refusals = 0

    def __len__(self) -> int:
        return len(self._records)

    def send(self, record: Record, *, control: bool = False) -> bool:
        """Put ``record`` on its way; False where there is no room. ``control`` has room of its own."""
        if len(self._records) >= self._capacity * (1 + control):
            self._refused = True
            self.refusals += 1
            return False
        self._last = max(self._last, self._clock.now + self._delay.draw())
        self._records.append((self._last, record))
        self._clock.at(self._last, self._on_record)
        return True

    def receive(self) -> Record | None:
        """The next record that has arrived, None if none has."""
        if not self._records or self._records[0][0] > self._clock.now:
            return None
        record = self._records.popleft()[1]
        if self._refused:
            self._refused = False
            self._clock.after(0, self._on_room)
        return record

    def salvage(self) -> list[Record]:
        """Everything that was sent, arrived or not: what the memory of a dead writer holds."""
        records = [record for _, record in self._records]
        self._records.clear()
        return records


class VirtualSlab:
    """Leased blocks in plain memory. Who reads a block that was given back breaks the run."""

    def __init__(self, name: str, blocks: int) -> None:
        self._name = name
        self._most = blocks
        self._blocks: dict[int, memoryview] = {}
        self._leases = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def lease(self, nbytes: int) -> SlabHandle:
        """A block of ``nbytes``. Raises SlabExhausted."""
        if len(self._blocks) >= self._most:
            raise SlabExhausted(f"all {self._most} blocks of {self._name} are leased")
        self._leases += 1
        self._blocks[self._leases] = memoryview(bytearray(nbytes))
        return SlabHandle(self._leases, 0, nbytes, self._leases)

    def view(self, handle: SlabHandle) -> memoryview:
        """The block that ``handle`` names."""
        block = self._blocks.get(handle.block)
        if block is None:
            raise Broken("lease", f"block {handle.block} of {self._name} was read after it was given back")
        return block

    def release(self, handle: SlabHandle) -> None:
        """The block is free."""
        if self._blocks.pop(handle.block, None) is None:
            raise Broken("lease", f"block {handle.block} of {self._name} was given back twice")


class VirtualSteps:
    """A cell's step ring in plain memory: the leader's side (mstar.worker.leader.StepOutlet)."""

    def __init__(self, clock: VirtualClock, layout: StepLayout, on_done: Callable[[], None]) -> None:
        self.layout = layout
        self.clock = clock
        self.on_done = on_done
        self.committed = 0
        size = slot_bytes(layout)
        self._memory = [memoryview(bytearray(size)) for _ in range(layout.slots)]
        self._slots = [StepSlot(memory, 0, layout) for memory in self._memory]
        self._done = [0] * layout.readers
        self._errors: list[str | None] = [None] * layout.readers
        self._readers: list[VirtualStepReader] = []

    def begin(self, seq: int) -> StepSlot:
        """The slot to write step ``seq`` into."""
        if seq != self.committed + 1:
            raise Broken("step ring", f"step {seq} begun after step {self.committed}")
        behind = min(self._done, default=seq)
        if seq - self.layout.slots > behind:
            raise Broken("step ring", f"step {seq} overwrites what a reader at step {behind} still reads")
        return self._slots[seq % self.layout.slots]

    def commit(self, seq: int) -> None:
        """Publish step ``seq``: each reader sees it after a delay of its own."""
        self.committed = seq
        for reader in self._readers:
            reader.publish(seq)

    def done(self, reader: int) -> int:
        """The last step that ``reader`` has finished."""
        return self._done[reader]

    def error(self, reader: int) -> str | None:
        """What ``reader`` has failed with."""
        return self._errors[reader]

    def post_done(self, reader: int, seq: int) -> None:
        """``reader`` has finished step ``seq``."""
        self._done[reader] = max(self._done[reader], seq)
        self.on_done()

    def post_error(self, reader: int, message: str) -> None:
        """``reader`` has failed."""
        if self._errors[reader] is None:
            self._errors[reader] = message
        self.on_done()

    def slot(self, seq: int) -> StepSlot:
        """The slot that step ``seq`` lies in."""
        return self._slots[seq % self.layout.slots]

    def bent(self, seq: int) -> StepSlot:
        """A copy of step ``seq`` with one bit of its first request id turned."""
        copy = StepSlot(memoryview(bytearray(self._memory[seq % self.layout.slots])), 0, self.layout)
        copy.request[0] ^= np.int64(1)
        return copy

    def reader(
        self, delay: Delay, on_step: Callable[[], None], bends: Callable[[int], bool]
    ) -> VirtualStepReader:
        """The next reader's side; a step for which ``bends`` says so reaches it with a flipped bit."""
        reader = VirtualStepReader(self, len(self._readers), delay, on_step, bends)
        self._readers.append(reader)
        return reader


class VirtualStepReader:
    """A follower's side of the step ring (mstar.worker.follower.StepInlet)."""

    def __init__(
        self,
        ring: VirtualSteps,
        index: int,
        delay: Delay,
        on_step: Callable[[], None],
        bends: Callable[[int], bool],
    ) -> None:
        self.next = 1
        self._ring = ring
        self._index = index
        self._delay = delay
        self._on_step = on_step
        self._bends = bends
        self._visible: deque[int] = deque()
        self._last = 0

    def publish(self, seq: int) -> None:
        """Step ``seq`` was committed; it becomes visible here later, in order."""
        clock = self._ring.clock
        self._last = max(self._last, clock.now + self._delay.draw())
        self._visible.append(self._last)
        clock.at(self._last, self._on_step)

    def peek(self) -> StepSlot | None:
        """The slot of step ``next`` once it is visible here."""
        if not self._visible or self._visible[0] > self._ring.clock.now:
            return None
        if self._bends(self.next):
            return self._ring.bent(self.next)
        return self._ring.slot(self.next)

    def done(self) -> None:
        """Step ``next`` is finished here; the leader hears of it after a delay."""
        self._visible.popleft()
        seq = self.next
        self.next += 1
        ring = self._ring
        delay = self._delay.draw()
        if delay:
            ring.clock.after(delay, lambda: ring.post_done(self._index, seq))
        else:
            ring.post_done(self._index, seq)

    def fail(self, message: str) -> None:
        """This reader has failed."""
        self._ring.post_error(self._index, message)


def slot_bytes(layout: StepLayout) -> int:
    """Bytes that hold a slot of ``layout``, each of its parts on a cache line."""
    rows, grants = layout.max_rows, layout.max_grants
    return 128 + 56 * rows + 12 * grants + layout.tail_bytes + _ALIGNED_PARTS * _LINE
