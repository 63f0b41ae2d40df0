"""The null model of one rank: no arithmetic, but a picture of everything a real one keeps.

Carry by slot, inputs held by slot, and what each cell of every KV page holds. Each row is checked against
the oracle: the carry it reads, the whole context it attends to through this rank's own block table,
and that its pages reach that far. A stale slot, a page freed early or a skipped token raises.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from mstar.engine.executor import RowRefused, SlotState
from mstar.engine.results import ResultSlot
from mstar.engine.slot_table import SlotTable
from mstar.messages.step import CARRY, LATE_RUN, Bind, StepPlan
from mstar.simulation.invariants import Broken
from mstar.simulation.oracle import Oracle, mask_of
from mstar.worker.limits import Limits

__all__ = ["NullModel"]

NONE = -1


class NullModel(SlotState):
    """One node on one rank. ``log`` is a checksum of every preparation and settlement, in order."""

    def __init__(self, name: str, limits: Limits, table: SlotTable, oracle: Oracle) -> None:
        self.table = table
        self.log = 0
        self._name = name
        self._oracle = oracle
        self._size = limits.page_size
        pages = table.tables[0].shape[1]
        self._width = pages * limits.page_size
        self._places: NDArray[np.int64] = np.arange(self._width)
        self._marks: NDArray[np.int64] = np.full((limits.slots, self._width), NONE, np.int64)
        self._next: NDArray[np.int32] = np.full((limits.slots, self._width + 1), NONE, np.int32)
        self._base: NDArray[np.int64] = np.zeros(limits.slots, np.int64)
        self._carry: NDArray[np.int32] = np.full(limits.slots, NONE, np.int32)
        self._logits: NDArray[np.int64] = np.full(limits.slots, NONE, np.int64)
        self._held: list[int] = [0] * limits.slots
        self._broken: set[int] = set()
        self._pages: NDArray[np.int64] = np.full((limits.pages, limits.page_size), NONE, np.int64)
        self._cells: NDArray[np.int64] = self._pages.reshape(-1)

    # ---- what a slot holds -------------------------------------------------------------------

    def bind(self, bind: Bind, tokens: NDArray[np.int32]) -> None:
        """Prepare the input of a slot once; it is held until its last chunk has run."""
        owed = self._oracle.sequences[bind.request]
        slot, length = bind.slot, bind.length
        self.log = zlib.crc32(b"bind %d %d %d" % (bind.request, slot, length), self.log)
        if self._held[slot]:
            raise Broken("held input", f"{self._name}: slot {slot} still holds an input at a bind")
        if owed.refused:
            self._broken.add(slot)
            raise RowRefused(f"sequence {bind.request} is refused by the model")
        if tokens.size != length or not np.array_equal(tokens, owed.tokens[:length]):
            raise Broken("input", f"{self._name}: sequence {bind.request} was bound to other tokens")
        size = owed.marks.size
        self._marks[slot, : min(size, self._width)] = owed.marks[: self._width]
        self._next[slot, :size] = owed.tokens
        self._base[slot] = length - bind.accepted
        self._carry[slot] = NONE
        self._logits[slot] = NONE
        self._held[slot] = length

    def drop(self, slot: int, request: int) -> None:
        """Forget a slot: nothing of it may be read again."""
        self._carry[slot] = NONE
        self._marks[slot] = NONE
        self._held[slot] = 0
        self._broken.discard(slot)
        self.log = zlib.crc32(b"drop %d %d" % (slot, request), self.log)

    def input_landed(self, slot: int, request: int) -> None:
        """The last chunk of a slot has landed: its input is let go."""
        self._held[slot] = 0

    def spoil(self, plan: StepPlan, results: ResultSlot) -> None:
        """The step failed before it ran: until they are dropped, its rows find nothing to read."""
        self._broken.update(plan.slot.tolist())
        results.tokens[plan.slot] = NONE

    @property
    def holding(self) -> int:
        """How many slots hold an input, or count as spoilt."""
        return sum(map(bool, self._held)) + len(self._broken)

    # ---- one step ----------------------------------------------------------------------------

    def forward(self, plan: StepPlan, results: ResultSlot) -> None:
        """Run the rows of ``plan``: decodes at once, chunks one by one."""
        n = plan.slot.size
        decodes = int(np.count_nonzero(plan.source == CARRY))
        if decodes:
            if np.count_nonzero(plan.source[:decodes] == CARRY) != decodes:
                raise Broken("rows", f"{self._name}: step {plan.seq} puts chunks before decodes")
            slots, counter = plan.slot[:decodes].astype(np.int64), plan.counter[:decodes]
            late = plan.late_sample[:decodes]
            if np.count_nonzero(late):
                self._draw_late(plan, late.nonzero()[0].tolist(), results)
                slots, counter = slots[late == 0], counter[late == 0]
            if self._broken:
                sound = np.array([slot not in self._broken for slot in slots.tolist()], bool)
                slots, counter = slots[sound], counter[sound]
            if slots.size:
                self._decode(plan, slots, counter, results)
        for row in range(decodes, n):
            if not self._broken or int(plan.slot[row]) not in self._broken:
                self._chunk(plan, row, results)

    def _decode(
        self, plan: StepPlan, slots: NDArray[np.int64], counter: NDArray[np.int32], results: ResultSlot
    ) -> None:
        ends = self._base[slots] + counter
        due = self._next[slots, ends - 1]
        wrong = self._carry[slots] != due
        if np.count_nonzero(wrong):
            row = int(wrong.argmax())
            raise Broken(
                "carry",
                f"{self._name}: step {plan.seq}, row {row}: slot {slots[row]} carries"
                f" {self._carry[slots[row]]}, due is {due[row]}",
            )
        self._reaches(plan, slots, ends)
        last = ends - 1
        size = self._size
        table = self.table.tables[0]
        pages = table[slots, last // size].astype(np.int64)
        self._cells[pages * size + last % size] = self._marks[slots, last]
        self._attend(plan, slots, ends)
        tokens = self._next[slots, ends]
        self._carry[slots] = tokens
        results.tokens[slots] = tokens

    def _draw_late(self, plan: StepPlan, rows: list[int], results: ResultSlot) -> None:
        """Draw from the logits that rows held, under their masks; then run what was drawn, and hold again."""
        masks = {mask.slot: mask.allowed for mask in plan.masks}
        for row in rows:
            slot, count = int(plan.slot[row]), int(plan.counter[row])
            if slot in self._broken:
                results.tokens[slot] = NONE  # nothing was drawn
                continue
            place = int(self._base[slot]) + count
            if self._logits[slot] != place:
                raise Broken(
                    "logits",
                    f"{self._name}: step {plan.seq}, slot {slot} draws at {place}, held {self._logits[slot]}",
                )
            if masks[slot] != mask_of(int(plan.request[row]), count):
                raise Broken("mask", f"{self._name}: step {plan.seq}, slot {slot} draws under another mask")
            self._carry[slot] = results.tokens[slot] = self._next[slot, place]
            self._logits[slot] = NONE
            if plan.late_sample[row] == LATE_RUN:
                self._run_tokens(plan, slot, place, place + 1)
                self._logits[slot] = place + 1

    def _chunk(self, plan: StepPlan, row: int, results: ResultSlot) -> None:
        slot = int(plan.slot[row])
        if plan.chunk_starts.size and plan.chunk_starts[row] >= 0:
            start, end = int(plan.chunk_starts[row]), int(plan.chunk_ends[row])
        else:
            start, end = 0, int(self.table.length[slot])
        if self._held[slot] != int(self.table.length[slot]):
            raise Broken(
                "held input", f"{self._name}: step {plan.seq}, row {row}: slot {slot} holds no input"
            )
        self._run_tokens(plan, slot, start, end)
        final = end == self._held[slot]
        if bool(plan.samples[row] or plan.late_sample[row]) != final:
            raise Broken("final chunk", f"{self._name}: step {plan.seq}, row {row} ends at {end}")
        if final and plan.late_sample[row]:
            self._logits[slot] = end
        elif final:
            self._carry[slot] = results.tokens[slot] = self._next[slot, end]
        self.log = zlib.crc32(b"chunk %d %d %d" % (slot, start, end), self.log)

    def _run_tokens(self, plan: StepPlan, slot: int, start: int, end: int) -> None:
        """Write what places [start, end) of ``slot`` put into the cache, and read all up to there."""
        slots, ends = np.array([slot]), np.array([end])
        self._reaches(plan, slots, ends)
        size = self._size
        places = self._places[start:end]
        pages = self.table.tables[0][slot, places // size].astype(np.int64)
        self._cells[pages * size + places % size] = self._marks[slot, start:end]
        self._attend(plan, slots, ends)

    def _reaches(self, plan: StepPlan, slots: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        short = ends > self.table.held[0][slots] * self._size
        if np.count_nonzero(short):
            slot = slots[short.argmax()]
            raise Broken("page", f"{self._name}: step {plan.seq}, slot {slot}: a token without a page")

    def _attend(self, plan: StepPlan, slots: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Read the whole context of each row through the block table and compare it with what is due."""
        width = -(-int(ends.max()) // self._size)
        seen = self._pages[self.table.tables[0][slots, :width]].reshape(slots.size, -1)
        wrong = seen != self._marks[slots, : width * self._size]
        wrong &= self._places[: width * self._size] < ends[:, None]
        if np.count_nonzero(wrong):
            at, place = np.argwhere(wrong)[0].tolist()
            slot = slots[at]
            raise Broken(
                "KV picture",
                f"{self._name}: step {plan.seq}, slot {slot}: request {self.table.owner[slot]} reads"
                f" something else than its own at place {place}",
            )

    def brings(self, plan: StepPlan) -> bytes:
        """What this rank brings to the collectives of ``plan``: counters, ranges and the carries it reads."""
        carried = self._carry[plan.slot[plan.source == CARRY]]
        parts = plan.source, plan.counter, plan.chunk_starts, plan.chunk_ends, carried
        return b"".join(part.tobytes() for part in parts)

    def signature(self) -> tuple[int, ...]:
        """Checksums of everything that must be equal on all ranks of the node after a step."""
        table = self.table
        crc = zlib.crc32(table.tables[0].data)
        for column in (table.owner, table.held[0], table.progress, table.generated, table.cap):
            crc = zlib.crc32(column.data, crc)
        return crc, zlib.crc32(self._logits.data, zlib.crc32(self._carry.data)), self.log
