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

    # ---- what changes hands ------------------------------------------------------------------

    def change(self, plan: StepPlan) -> list[int]:
        """Check and take over the drops, binds and grants of ``plan``, in that order.

        Returns the slots that were dropped. Raises PlanMismatch; no row has been touched then.
        """
        if plan.seq <= self.seq:
            raise PlanMismatch(plan.seq, -1, "seq", plan.seq, f"after {self.seq}")
        self.seq = plan.seq
        dropped = []
        for request in plan.drops.tolist():
            slot = self.slot_of.get(request)
            if slot is None:
                raise PlanMismatch(plan.seq, -1, "drop", request, "no slot of that request")
            self._drop(request)
            dropped.append(slot)
        for bind in plan.binds:
            self._check_bind(plan.seq, bind)
            self._bind(bind)
        if plan.grant_slot.size:
            self._check_grants(plan)
            self._grant(plan)
        return dropped

    def _check_bind(self, seq: int, bind: Bind) -> None:
        slot = bind.slot
        if not 0 <= slot < self.count:
            raise PlanMismatch(seq, -1, "bind slot", slot, f"0 to {self.count - 1}")
        if self.owner[slot] != FREE:
            raise PlanMismatch(seq, -1, f"bind of slot {slot}", bind.request, int(self.owner[slot]))
        if bind.length < 1 or not 0 <= bind.accepted < bind.length or bind.cap <= bind.accepted:
            values = f"length {bind.length}, accepted {bind.accepted}, cap {bind.cap}"
            raise PlanMismatch(seq, -1, f"bind of slot {slot}", values, "accepted below both others")

    def _check_grants(self, plan: StepPlan) -> None:
        slots, pools, pages = plan.grant_slot, plan.grant_pool, plan.grant_page
        for name, column, count in (
            ("slot", slots, self.count),
            ("pool", pools, len(self.tables)),
            ("page", pages, 1 << 31),
        ):
            outside = _outside(column, count)
            if np.count_nonzero(outside):
                raise PlanMismatch(
                    plan.seq, -1, f"grant {name}", int(column[outside][0]), f"0 to {count - 1}"
                )
        for pool, (table, held) in enumerate(zip(self.tables, self.held, strict=True)):
            mine = slots if len(self.tables) == 1 else slots[pools == pool]
            after = np.bincount(mine, minlength=self.count)
            after += held
            if np.count_nonzero(after > table.shape[1]):
                worst = int(after.argmax())
                raise PlanMismatch(
                    plan.seq, -1, f"pages of slot {worst}", int(after[worst]), f"at most {table.shape[1]}"
                )

    # ---- rows --------------------------------------------------------------------------------

    def advance(self, plan: StepPlan) -> None:
        """Check every row of ``plan`` against this rank's state, then move the Loops on by them.

        Raises PlanMismatch before any row is touched.
        """
        slots = plan.slot
        n = slots.size
        for name in ("chunk_ends", "chunk_totals", "chunk_strides"):
            size = getattr(plan, name).size
            if size != plan.chunk_starts.size:
                raise PlanMismatch(plan.seq, -1, name, f"{size} rows", f"{plan.chunk_starts.size} rows")
        if not n:
            return
        chunked = 0
        if plan.chunk_starts.size:
            if plan.chunk_starts.size != n:
                raise PlanMismatch(
                    plan.seq, -1, "chunk_starts", f"{plan.chunk_starts.size} rows", f"{n} rows"
                )
            chunk = plan.chunk_starts >= 0
            chunked = int(np.count_nonzero(chunk))
            if np.count_nonzero(chunk[n - chunked :]) != chunked:
                raise PlanMismatch(plan.seq, int(chunk.argmax()), "row", "chunked", "chunked rows come last")
        plain = n - chunked
        if not self._fits(plan, plain):
            self._find_fault(plan, plain)
        if chunked:
            self._advance_chunks(plan, plain)
        if np.count_nonzero(plan.source[:plain]) != plain:
            whole = slots[:plain][plan.source[:plain] == INPUT]
            self.progress[whole] = self.length[whole]
        self.generated[slots] += plan.samples

    def _fits(self, plan: StepPlan, plain: int) -> bool:
        """Every check of the first ``plain`` rows in few passes; on False ``_find_fault`` names one."""
        slots = plan.slot
        if np.count_nonzero(_outside(slots, self.count)):
            return False
        loop = slots[:plain]
        if np.count_nonzero(loop[1:] <= loop[:-1]):
            return False
        if plain < slots.size and np.count_nonzero(np.bincount(slots) > 1):
            return False
        counter = plan.counter[:plain]
        fits = (self.generated[loop] == counter) & (self.cap[loop] > counter)
        if np.count_nonzero(plan.source[:plain]) != plain:
            fits |= (plan.source[:plain] == INPUT) & (self.progress[loop] == counter)
        return np.count_nonzero(fits) == plain and not np.count_nonzero(self.owner[slots] != plan.request)

    def _find_fault(self, plan: StepPlan, plain: int) -> None:
        """Name the first row that does not fit; rows out of slot order that do fit pass."""
        seen: set[int] = set()
        for row, (slot, request, counter, source) in enumerate(
            zip(
                plan.slot.tolist(),
                plan.request.tolist(),
                plan.counter.tolist(),
                plan.source.tolist(),
                strict=True,
            )
        ):
            if not 0 <= slot < self.count:
                raise PlanMismatch(plan.seq, row, "slot", slot, f"0 to {self.count - 1}")
            if slot in seen:
                raise PlanMismatch(plan.seq, row, "slot", slot, "named by an earlier row")
            seen.add(slot)
            if self.owner[slot] != request:
                raise PlanMismatch(plan.seq, row, "request", request, int(self.owner[slot]))
            if row >= plain:
                continue
            held = int(self.progress[slot] if source == INPUT else self.generated[slot])
            if counter != held:
                raise PlanMismatch(plan.seq, row, "counter", counter, held)
            if source != INPUT and counter >= self.cap[slot]:
                raise PlanMismatch(plan.seq, row, "counter", counter, f"below the cap {int(self.cap[slot])}")

    def _advance_chunks(self, plan: StepPlan, plain: int) -> None:
        """Check the chunked rows, which come last, then move their chunk Loops."""
        moved = []
        for row in range(plain, plan.slot.size):
            slot, counter = int(plan.slot[row]), int(plan.counter[row])
            start, end = int(plan.chunk_starts[row]), int(plan.chunk_ends[row])
            total, stride = int(plan.chunk_totals[row]), int(plan.chunk_strides[row])
            length, progress = int(self.length[slot]), int(self.progress[slot])
            first = counter == 0
            faults: tuple[tuple[str, int, int], ...] = (
                ("chunk_totals", total, length),
                ("counter", counter, progress),
                ("chunk_strides", stride, end if first else end - start),
                ("chunk_starts", start, start if first else progress),
                ("samples", int(plan.samples[row]), int(end == total)),
            )
            for field, planned, held in faults:
                if planned != held:
                    raise PlanMismatch(plan.seq, row, field, planned, held)
            if not start < end <= total:
                raise PlanMismatch(
                    plan.seq, row, "chunk", f"[{start}, {end})", f"a range within {length} prepared tokens"
                )
            moved.append((slot, stride))
        for slot, stride in moved:
            self.progress[slot] += stride

    # ---- the parts of a change ---------------------------------------------------------------

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
            slots, pages = plan.grant_slot, plan.grant_page
            if len(self.tables) > 1:
                mine = plan.grant_pool == pool
                slots, pages = slots[mine], pages[mine]
            if not slots.size:
                continue
            runs = (slots[1:] != slots[:-1]).nonzero()[0] + 1
            if runs.size + 1 == slots.size and not np.count_nonzero(slots[1:] <= slots[:-1]):
                at = held[slots]
                table[slots, at] = pages
                held[slots] = at + 1
                continue
            for start, end in zip([0, *runs.tolist()], [*runs.tolist(), slots.size], strict=True):
                slot = slots[start]
                at = held[slot]
                table[slot, at : at + end - start] = pages[start:end]
                held[slot] += end - start

    def statistics(self) -> SlotTableStatistics:
        """Counts at this moment."""
        return SlotTableStatistics(len(self.slot_of), self.seq, tuple(int(held.sum()) for held in self.held))


def _outside(column: NDArray[np.int32], count: int) -> NDArray[np.bool_]:
    """Which values are not in [0, count): a negative one is a huge one when read as unsigned."""
    return column.view(np.uint32) >= count
