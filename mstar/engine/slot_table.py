"""SlotTable: what a rank knows of the slots of one node, and the check of every plan against it.

A rank learns all of it from plans (binds, grants, drops, rows), and moves its requests through the graph
by them: the Loops that run in every step are columns of the graph's own state. Sans-IO and plain numpy: a
device stands on it, the simulator and the tests use it alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.graph.errors import WalkStateError
from mstar.graph.runtime import PENDING, GraphRuntime
from mstar.messages.step import INPUT, LATE_LAST, LATE_RUN, Bind, StepPlan
from mstar.model.graphs import LANGUAGE_MODEL, WALKS

__all__ = ["FREE", "PlanMismatch", "SlotTable", "SlotTableStatistics"]

FREE = -1

_SAMPLED_AT_PREFILL = int(LANGUAGE_MODEL.loop.start[WALKS.decode_loop])
"""Tokens that a row has generated when its decode Loop begins."""

_ZERO: NDArray[np.int32] = np.array(0, np.int32)
_NO_ROWS: NDArray[np.int64] = np.empty(0, np.int64)
_FEW_GRANTS = 3
_CHUNK_FIELDS = ("chunk_totals", "counter", "chunk_strides", "chunk_starts", "samples")


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
    ``generated`` how far the decode Loop has come, PENDING until the input has run, and ``cap`` its
    end: these are columns of ``graph``. ``late`` rows draw under masks. ``tables[p]`` is int32 [slots,
    pages of a row] of pool ``p``, ``held[p]`` int32 [slots] how many of them are granted.
    """

    def __init__(self, slots: int, pool_pages: tuple[int, ...]) -> None:
        self.count = slots
        self.seq = 0
        self.graph = graph = GraphRuntime(LANGUAGE_MODEL, slots)
        self.owner: NDArray[np.int64] = np.full(slots, FREE, np.int64)
        self.attempt: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.accepted: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.progress: NDArray[np.int32] = graph.counter[WALKS.prompt_loop]
        self.length: NDArray[np.int32] = graph.cap[WALKS.prompt_loop]
        self.generated: NDArray[np.int32] = graph.counter[WALKS.decode_loop]
        self.cap: NDArray[np.int32] = graph.cap[WALKS.decode_loop]
        self.late: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._late_rows = 0
        self.tables: list[NDArray[np.int32]] = [np.full((slots, pages), -1, np.int32) for pages in pool_pages]
        self._flat: NDArray[np.int32] = self.tables[0].reshape(-1) if pool_pages else np.empty(0, np.int32)
        self.held: list[NDArray[np.int32]] = [np.zeros(slots, np.int32) for _ in pool_pages]
        self.slot_of: dict[int, int] = {}
        self._named = b""
        self._rows = _NO_ROWS

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

    # ---- rows --------------------------------------------------------------------------------

    def advance(self, plan: StepPlan) -> None:
        """Check every row of ``plan`` against this rank's state, then move the Loops on by them.

        Raises PlanMismatch before any row is touched.
        """
        n = plan.slot.size
        chunked = self._count_chunks(plan, n)
        plain = n - chunked
        if self._late_rows or np.count_nonzero(plan.late_sample):
            self._check_late(plan)
        moved = self._check_chunks(plan, plain) if chunked else ()
        if plain:
            self._advance_plain(plan, plain)
        for slot, stride, final in moved:
            self.progress[slot] += stride
            if final:
                self._end_input(slot, sampled=not self.late[slot])

    def _count_chunks(self, plan: StepPlan, n: int) -> int:
        """How many rows are chunked; they come last."""
        starts = plan.chunk_starts
        size = starts.size
        if not size == plan.chunk_ends.size == plan.chunk_totals.size == plan.chunk_strides.size:
            sizes = [plan.chunk_ends.size, plan.chunk_totals.size, plan.chunk_strides.size]
            raise PlanMismatch(plan.seq, -1, "rows of chunk_ends, chunk_totals, chunk_strides", sizes, size)
        if not size:
            return 0
        if size != n:
            raise PlanMismatch(plan.seq, -1, "chunk_starts", f"{size} rows", f"{n} rows")
        chunk = starts >= _ZERO
        chunked = int(np.count_nonzero(chunk))
        if np.count_nonzero(chunk[n - chunked :]) != chunked:
            raise PlanMismatch(plan.seq, int(chunk.argmax()), "row", "chunked", "chunked rows come last")
        return chunked

    def _check_late(self, plan: StepPlan) -> None:
        """Rows bound to draw late do so once their input has run, under a mask each; no other does."""
        masks = {mask.slot for mask in plan.masks}
        waits = (
            plan.chunk_ends < plan.chunk_totals if plan.chunk_ends.size else np.zeros(plan.slot.size, bool)
        )
        columns = (plan.slot, plan.late_sample, plan.samples, waits)
        for row, (slot, late, samples, wait) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            held = 0 <= slot < self.count and bool(self.late[slot]) and not wait
            if bool(late) != held or late not in (0, LATE_RUN, LATE_LAST):
                raise PlanMismatch(plan.seq, row, "late_sample", late, "late" if held else "not late")
            if late and samples and slot not in masks:
                raise PlanMismatch(plan.seq, row, "mask", "missing", "a row that draws late")

    def _advance_plain(self, plan: StepPlan, plain: int) -> None:
        """Check and move the first ``plain`` rows: decodes, and whole inputs that run at once."""
        slots, counter, samples = plan.slot, plan.counter, plan.samples
        if plain < slots.size:
            slots, counter, samples = slots[:plain], counter[:plain], samples[:plain]
        rows = self._ascending(slots)
        if np.count_nonzero(plan.source[:plain]) == plain and self._fits(plan, rows, counter, samples):
            try:
                self.graph.advance(WALKS.decode_loop, rows)
            except WalkStateError:
                pass  # a row is at its cap, which is named below
            else:
                return
        self._find_fault(plan, plain)
        whole = plan.source[:plain] == INPUT
        self.generated[slots[~whole]] = (counter + samples)[~whole]
        for slot, sampled in zip(slots[whole].tolist(), samples[whole].tolist(), strict=True):
            self.progress[slot] = self.length[slot]
            self._end_input(slot, sampled=bool(sampled))

    def _end_input(self, slot: int, *, sampled: bool) -> None:
        """The input of ``slot`` has run: its walk ends, and the one after it is entered here.

        A row that has not ``sampled`` yet draws late, or never; its decode Loop is one token behind then.
        """
        self.generated[slot] = int(self.accepted[slot]) + (_SAMPLED_AT_PREFILL if sampled else 0)

    def _ascending(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """``slots`` as an index, where all are ours and in order; else none. Most steps repeat the last."""
        named = slots.tobytes()
        if named != self._named:
            rows = slots.astype(np.int64)
            ours = rows[0] >= 0 and rows[-1] < self.count
            if not ours or np.count_nonzero(rows[1:] > rows[:-1]) != rows.size - 1:
                return _NO_ROWS
            self._named, self._rows = named, rows
        return self._rows

    def _fits(
        self,
        plan: StepPlan,
        rows: NDArray[np.int64],
        counter: NDArray[np.int32],
        samples: NDArray[np.int32],
    ) -> bool:
        """The check of rows that decode, in few passes, but for their caps, which the graph keeps.

        On False ``_find_fault`` names the fault or finds none: rows out of slot order are right too.
        """
        n = counter.size
        return (
            rows.size == n
            and self.generated[rows].tobytes() == counter.tobytes()
            and self.owner[rows].tobytes() == plan.request[:n].tobytes()
            and np.count_nonzero(samples) == n
        )

    def _find_fault(self, plan: StepPlan, plain: int) -> None:
        """Raise for the first of the first ``plain`` rows that does not fit, if any."""
        seen: set[int] = set()
        columns = (plan.slot, plan.request, plan.counter, plan.source)
        rows = zip(*(column[:plain].tolist() for column in columns), strict=True)
        for row, (slot, request, counter, source) in enumerate(rows):
            self._check_slot(plan.seq, row, slot, request, seen)
            held = int(self.progress[slot] if source == INPUT else self.generated[slot])
            if counter != held:
                raise PlanMismatch(plan.seq, row, "counter", counter, held)
            if source != INPUT and counter >= self.cap[slot]:
                raise PlanMismatch(plan.seq, row, "counter", counter, f"below the cap {int(self.cap[slot])}")

    def _check_slot(self, seq: int, row: int, slot: int, request: int, seen: set[int]) -> None:
        if not 0 <= slot < self.count:
            raise PlanMismatch(seq, row, "slot", slot, f"0 to {self.count - 1}")
        if slot in seen:
            raise PlanMismatch(seq, row, "slot", slot, "named by an earlier row")
        seen.add(slot)
        if self.owner[slot] != request:
            raise PlanMismatch(seq, row, "request", request, int(self.owner[slot]))

    def _check_chunks(self, plan: StepPlan, plain: int) -> list[tuple[int, int, bool]]:
        """Check the chunked rows, which come last; returns (slot, stride, final) of each.

        A slot can't be both: it decodes only after its last chunk, and has chunks only before that.
        """
        moved: list[tuple[int, int, bool]] = []
        seen: set[int] = set()
        columns = (
            plan.slot,
            plan.request,
            plan.counter,
            plan.samples,
            plan.chunk_starts,
            plan.chunk_ends,
            plan.chunk_totals,
            plan.chunk_strides,
        )
        rows = zip(*(column[plain:].tolist() for column in columns), strict=True)
        for row, (slot, request, counter, samples, start, end, total, stride) in enumerate(rows, plain):
            self._check_slot(plan.seq, row, slot, request, seen)
            length, progress = int(self.length[slot]), int(self.progress[slot])
            first = counter == 0
            final = end == total
            planned = total, counter, stride, start, samples
            held = (
                length,
                progress,
                end if first else end - start,
                start if first else progress,
                int(final and not self.late[slot]),
            )
            if planned != held:
                field = next(at for at in range(len(held)) if planned[at] != held[at])
                raise PlanMismatch(plan.seq, row, _CHUNK_FIELDS[field], planned[field], held[field])
            if not start < end <= total:
                raise PlanMismatch(
                    plan.seq, row, "chunk", f"[{start}, {end})", f"a range within {length} prepared tokens"
                )
            moved.append((slot, stride, final))
        return moved

    # ---- the parts of a change ---------------------------------------------------------------

    def _drop(self, request: int) -> None:
        slot = self.slot_of.pop(request)
        self.progress[slot] = self.generated[slot] = PENDING
        self.length[slot] = self.cap[slot] = 0
        self.owner[slot] = FREE
        self._late_rows -= bool(self.late[slot])
        self.late[slot] = False
        for held, table in zip(self.held, self.tables, strict=True):
            table[slot, : held[slot]] = -1
            held[slot] = 0

    def _bind(self, bind: Bind) -> None:
        slot = bind.slot
        self.slot_of[bind.request] = slot
        self.owner[slot] = bind.request
        self.attempt[slot] = bind.attempt
        self.accepted[slot] = bind.accepted
        self.length[slot] = bind.length
        self.cap[slot] = bind.cap
        self.progress[slot] = 0
        self.generated[slot] = PENDING
        self.late[slot] = bind.late
        self._late_rows += bind.late

    def _grant(self, plan: StepPlan) -> None:
        """Append granted pages to the tables, in the record's order; a slot may be named more than once.

        A step's grants are mostly one page each to rows that decode, in slot order, and runs of one slot
        for chunks: the former go in at once, the latter a run at a time.
        """
        slots, pools, pages = plan.grant_slot, plan.grant_pool, plan.grant_page
        if np.count_nonzero(pages < _ZERO):
            raise PlanMismatch(plan.seq, -1, "grant page", int(pages.min()), "0 or more")
        count = slots.size
        border = slots[1:] != slots[:-1]
        if np.count_nonzero(pools):
            border |= pools[1:] != pools[:-1]
        elif not np.count_nonzero(border):
            self._grant_run(plan.seq, int(slots[0]), 0, pages)
            return
        singles = count if np.count_nonzero(border) == count - 1 else int(border.argmin())
        start = singles if singles > _FEW_GRANTS and self._grant_singles(plan, singles) else 0
        if start < count:
            for end in (*(border[start:].nonzero()[0] + (start + 1)).tolist(), count):
                self._grant_run(plan.seq, int(slots[start]), int(pools[start]), pages[start:end])
                start = end

    def _grant_singles(self, plan: StepPlan, count: int) -> bool:
        """One page of the first pool to each of the first ``count`` grants' slots, which ascend.

        False, and nothing done, where a grant is anything else or does not fit.
        """
        rows = plan.grant_slot[:count].astype(np.int64)
        if not self.tables or np.count_nonzero(plan.grant_pool[:count]):
            return False
        if rows[0] < 0 or rows[-1] >= self.count or np.count_nonzero(rows[1:] <= rows[:-1]):
            return False
        held, width = self.held[0], self.tables[0].shape[1]
        at = held[rows]
        if np.count_nonzero(at < width) != count or np.count_nonzero(self.owner[rows] == FREE):
            return False
        self._flat[rows * width + at] = plan.grant_page[:count]
        held[rows] = at + 1
        return True

    def _grant_run(self, seq: int, slot: int, pool: int, pages: NDArray[np.int32]) -> None:
        """Append ``pages`` to the table of one slot."""
        if not 0 <= slot < self.count:
            raise PlanMismatch(seq, -1, "grant slot", slot, f"0 to {self.count - 1}")
        if not 0 <= pool < len(self.tables):
            raise PlanMismatch(seq, -1, "grant pool", pool, f"0 to {len(self.tables) - 1}")
        if self.owner[slot] == FREE:
            raise PlanMismatch(seq, -1, "grant slot", slot, "free")
        row, held = self.tables[pool][slot], self.held[pool]
        at = int(held[slot])
        after = at + pages.size
        if after > row.size:
            raise PlanMismatch(seq, -1, f"pages of slot {slot}", after, f"at most {row.size}")
        row[at:after] = pages
        held[slot] = after

    def statistics(self) -> SlotTableStatistics:
        """Counts at this moment."""
        return SlotTableStatistics(len(self.slot_of), self.seq, tuple(int(held.sum()) for held in self.held))
