"""SlotTable: what a rank knows of the slots of one node, and the check of every plan against it.

A rank learns all of it from plans (binds, grants, drops, rows). Sans-IO and plain numpy: a device
stands on it, the simulator and the tests use it alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.messages.step import INPUT, Bind, StepPlan

__all__ = ["FREE", "PlanMismatch", "SlotTable", "SlotTableStatistics"]

FREE = -1


class PlanMismatch(Exception):
    """A plan contradicts this rank's own state; nothing of it was applied. The cell must fail loudly."""

    def __init__(self, seq: int, row: int, field: str, planned: object, held: object) -> None:
        super().__init__(f"step {seq}, row {row}: {field} is {planned} in the plan, {held} on this rank")
        self.seq, self.row, self.field, self.planned, self.held = seq, row, field, planned, held


class SlotTableStatistics(NamedTuple):
    """Slots bound now, the last step applied, pages held per pool."""

    bound: int
    seq: int
    pages: tuple[int, ...]


class SlotTable:
    """State of ``slots`` slots of one node as columns, and the page table of each of its pools.

    ``owner`` is the request or FREE; ``length`` the prepared length of its input in tokens,
    ``accepted`` of them generated earlier; ``progress`` how far the chunk Loop has come;
    ``generated`` how far the decode Loop has come and ``cap`` its end. ``tables[p]`` is int32
    [slots, pages of a row] of pool ``p``, ``held[p]`` int32 [slots] how many of them are granted.
    """

    def __init__(self, slots: int, pool_pages: tuple[int, ...]) -> None:
        self.count = slots
        self.seq = 0
        self.owner: NDArray[np.int64] = np.full(slots, FREE, np.int64)
        self.attempt: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.length: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.accepted: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.progress: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.generated: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.cap: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.tables: list[NDArray[np.int32]] = [np.full((slots, pages), -1, np.int32) for pages in pool_pages]
        self.held: list[NDArray[np.int32]] = [np.zeros(slots, np.int32) for _ in pool_pages]
        self.slot_of: dict[int, int] = {}

    # ---- checking ----------------------------------------------------------------------------

    def check(self, plan: StepPlan) -> None:
        """Raise PlanMismatch unless every part of ``plan`` fits this rank's state; changes nothing."""
        if plan.seq <= self.seq:
            raise PlanMismatch(plan.seq, -1, "seq", plan.seq, f"after {self.seq}")
        n = plan.request.size
        for name in ("chunk_starts", "chunk_ends", "chunk_totals", "chunk_strides"):
            size = getattr(plan, name).size
            if size != n and (size or plan.chunk_starts.size):
                raise PlanMismatch(plan.seq, -1, name, f"{size} rows", f"{n} rows")
        if plan.binds or plan.drops.size:
            self._check_changes(plan)
        self._check_grants(plan)
        if n:
            self._check_rows(plan)

    def _check_changes(self, plan: StepPlan) -> None:
        dropped: set[int] = set()
        for request in plan.drops.tolist():
            slot = self.slot_of.get(request)
            if slot is None or slot in dropped:
                raise PlanMismatch(plan.seq, -1, "drop", request, "no slot of that request")
            dropped.add(slot)
        bound: set[int] = set()
        for bind in plan.binds:
            slot = bind.slot
            if not 0 <= slot < self.count:
                raise PlanMismatch(plan.seq, -1, "bind slot", slot, f"0 to {self.count - 1}")
            if slot in bound or (self.owner[slot] != FREE and slot not in dropped):
                raise PlanMismatch(plan.seq, -1, f"bind of slot {slot}", bind.request, int(self.owner[slot]))
            if bind.length < 1 or not 0 <= bind.accepted < bind.length or bind.cap <= bind.accepted:
                raise PlanMismatch(
                    plan.seq,
                    -1,
                    f"bind of slot {slot}",
                    f"length {bind.length}, cap {bind.cap}",
                    "1 or more each",
                )
            bound.add(slot)

    def _check_grants(self, plan: StepPlan) -> None:
        if not plan.grant_slot.size:
            return
        pools = plan.grant_pool
        if pools.min() < 0 or pools.max() >= len(self.tables):
            raise PlanMismatch(plan.seq, -1, "grant pool", int(pools.max()), f"0 to {len(self.tables) - 1}")
        if plan.grant_slot.min() < 0 or plan.grant_slot.max() >= self.count:
            raise PlanMismatch(
                plan.seq, -1, "grant slot", int(plan.grant_slot.max()), f"0 to {self.count - 1}"
            )
        if plan.grant_page.min() < 0:
            raise PlanMismatch(plan.seq, -1, "grant page", int(plan.grant_page.min()), "0 or more")
        for pool, (table, held) in enumerate(zip(self.tables, self.held, strict=True)):
            mine = plan.grant_slot if len(self.tables) == 1 else plan.grant_slot[pools == pool]
            after = np.bincount(mine, minlength=self.count) + held
            if plan.drops.size:
                dropped = [self.slot_of[request] for request in plan.drops.tolist()]
                after[dropped] -= held[dropped]
            worst = int(after.argmax())
            if after[worst] > table.shape[1]:
                raise PlanMismatch(
                    plan.seq, -1, f"pages of slot {worst}", int(after[worst]), f"at most {table.shape[1]}"
                )

    def _check_rows(self, plan: StepPlan) -> None:
        slots = plan.slot
        if slots.min() < 0 or slots.max() >= self.count:
            raise PlanMismatch(
                plan.seq, int(slots.argmax()), "slot", int(slots.max()), f"0 to {self.count - 1}"
            )
        if np.bincount(slots, minlength=1).max() > 1:
            raise PlanMismatch(plan.seq, int(slots.argmax()), "slot", "named twice", "once")
        owner, length = self.owner[slots], self.length[slots]
        progress, generated, cap = self.progress[slots], self.generated[slots], self.cap[slots]
        if plan.binds or plan.drops.size:
            for request in plan.drops.tolist():
                owner[slots == self.slot_of[request]] = FREE
            for bind in plan.binds:
                mine = slots == bind.slot
                owner[mine], length[mine], progress[mine] = bind.request, bind.length, 0
                generated[mine], cap[mine] = bind.accepted, bind.cap
        self._agree(plan, "request", plan.request, owner)
        if plan.chunk_starts.size:
            self._check_chunks(plan, length, progress)
            loop = plan.chunk_starts < 0
            whole = loop & (plan.source == INPUT)
            if whole.any():
                loop = loop & ~whole
                self._agree(plan, "counter", plan.counter[whole], progress[whole], np.flatnonzero(whole))
            if not loop.any():
                return
            rows = np.flatnonzero(loop)
        else:
            rows = np.flatnonzero(plan.source != INPUT)
        counter = plan.counter[rows]
        self._agree(plan, "counter", counter, generated[rows], rows)
        over = counter >= cap[rows]
        if over.any():
            at = int(over.argmax())
            raise PlanMismatch(
                plan.seq, int(rows[at]), "counter", int(counter[at]), f"below the cap {int(cap[rows[at]])}"
            )

    def _check_chunks(self, plan: StepPlan, length: NDArray[np.int32], progress: NDArray[np.int32]) -> None:
        chunk = plan.chunk_starts >= 0
        rows = np.flatnonzero(chunk)
        starts, ends = plan.chunk_starts[rows], plan.chunk_ends[rows]
        totals, strides, counter = plan.chunk_totals[rows], plan.chunk_strides[rows], plan.counter[rows]
        other = np.flatnonzero(~chunk)
        for name in ("chunk_ends", "chunk_totals", "chunk_strides"):
            self._agree(plan, name, getattr(plan, name)[other], np.full(other.size, -1, np.int32), other)
        self._agree(plan, "chunk_totals", totals, length[rows], rows)
        self._agree(plan, "counter", counter, progress[rows], rows)
        first = counter == 0
        self._agree(plan, "chunk_strides", strides, np.where(first, ends, ends - starts), rows)
        self._agree(plan, "chunk_starts", starts[~first], progress[rows][~first], rows[~first])
        bad = (ends > totals) | (starts >= ends)
        if bad.any():
            at = int(bad.argmax())
            raise PlanMismatch(
                plan.seq,
                int(rows[at]),
                "chunk",
                f"[{starts[at]}, {ends[at]})",
                f"a range within {int(length[rows[at]])} prepared tokens",
            )
        self._agree(plan, "samples", plan.samples[rows], (ends == totals).astype(np.int32), rows)

    def _agree(
        self,
        plan: StepPlan,
        field: str,
        planned: NDArray[np.integer],
        held: NDArray[np.integer],
        rows: NDArray[np.integer] | None = None,
    ) -> None:
        differs = planned != held
        if differs.any():
            at = int(differs.argmax())
            raise PlanMismatch(
                plan.seq, int(rows[at]) if rows is not None else at, field, int(planned[at]), int(held[at])
            )

    # ---- applying ----------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Take over drops, binds, grants, rows, in that order, of a ``plan`` that ``check`` let through."""
        self.seq = plan.seq
        for request in plan.drops.tolist():
            self._drop(request)
        for bind in plan.binds:
            self._bind(bind)
        if plan.grant_slot.size:
            self._grant(plan)
        if plan.chunk_starts.size:
            chunk = plan.chunk_starts >= 0
            slots = plan.slot[chunk]
            self.progress[slots] += plan.chunk_strides[chunk]
        whole = plan.source == INPUT
        if whole.any():
            if plan.chunk_starts.size:
                whole &= plan.chunk_starts < 0
            slots = plan.slot[whole]
            self.progress[slots] = self.length[slots]
        self.generated[plan.slot] += plan.samples

    def _drop(self, request: int) -> None:
        slot = self.slot_of.pop(request)
        self.owner[slot] = FREE
        for held, table in zip(self.held, self.tables, strict=True):
            table[slot, : held[slot]] = -1
            held[slot] = 0

    def _bind(self, bind: Bind) -> None:
        slot = bind.slot
        self.slot_of[bind.request] = slot
        self.owner[slot] = bind.request
        self.attempt[slot] = bind.attempt
        self.length[slot] = bind.length
        self.accepted[slot] = bind.accepted
        self.progress[slot] = 0
        self.generated[slot] = bind.accepted
        self.cap[slot] = bind.cap

    def _grant(self, plan: StepPlan) -> None:
        """Append granted pages to the tables, in the record's order; a slot may be named more than once."""
        for pool, (table, held) in enumerate(zip(self.tables, self.held, strict=True)):
            mine = plan.grant_pool == pool
            slots, pages = plan.grant_slot[mine], plan.grant_page[mine]
            if not slots.size:
                continue
            order = np.argsort(slots, kind="stable")
            slots, pages = slots[order], pages[order]
            start = np.r_[True, slots[1:] != slots[:-1]]
            first = np.flatnonzero(start)
            rank = np.arange(slots.size) - np.repeat(first, np.diff(np.r_[first, slots.size]))
            at = held[slots] + rank
            table[slots, at] = pages
            np.add.at(held, slots, 1)

    def statistics(self) -> SlotTableStatistics:
        """Counts at this moment."""
        return SlotTableStatistics(len(self.slot_of), self.seq, tuple(int(held.sum()) for held in self.held))
