"""PlanAudit: every plan of a cell against all plans before it, with books of its own.

It reads plans as a rank does and keeps what follows from them: rows, pages and who holds them, what is ready,
what should have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mstar.messages.step import CARRY, LATE_RUN, StepPlan
from mstar.messages.tokens import RUNNING, RowFailed, TokenBatch
from mstar.simulation.invariants import Broken
from mstar.worker.limits import Limits

__all__ = ["PlanAudit", "Work"]


class Work(NamedTuple):
    """What a plan runs: decode rows, tokens in chunks, rows, and the sum of query_len * kv_len."""

    decodes: int
    chunk_tokens: int
    rows: int
    context: int


class _Row:
    """A slot as the plans tell of it."""

    __slots__ = (
        "base",
        "cap",
        "generated",
        "late",
        "length",
        "pages",
        "progress",
        "request",
        "shared",
        "started",
    )

    def __init__(self, request: int, length: int, accepted: int, cap: int, late: bool) -> None:
        self.request = request
        self.length = length
        self.base = length - accepted
        self.cap = cap
        self.late = late
        self.progress = 0
        self.generated = accepted
        self.started = False
        self.pages: list[int] = []
        self.shared = 0

    @property
    def ready(self) -> bool:
        """The input has run to its end and a token is still to come."""
        return self.progress == self.length and self.generated < self.cap


class _Node:
    """One node's rows and pages as the plans tell of them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rows: dict[int, _Row] = {}
        self.slot_of: dict[int, int] = {}
        self.over: set[int] = set()
        self.left_slots: dict[int, int] = {}
        self.holders: dict[int, int] = {}
        self.left_pages: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self.passed = 0


class PlanAudit:
    """Checks every plan of a cell against all plans before it. ``nodes`` are the cell's limits."""

    def __init__(self, nodes: Sequence[Limits]) -> None:
        self._nodes = [_Node(limits) for limits in nodes]
        self._depth = nodes[0].depth
        self._seq = 0
        self.landed = 0

    # ---- what the leader was told ------------------------------------------------------------

    def over(self, request: int) -> None:
        """``request`` was aborted or has ended: the next plan of its node drops it."""
        for node in self._nodes:
            if request in node.slot_of:
                node.over.add(request)

    def land(self, seq: int, batch: TokenBatch | None, failed: Sequence[RowFailed]) -> None:
        """Step ``seq`` has landed with these results."""
        self.landed = seq
        if batch is not None:
            for request, finish in zip(batch.request.tolist(), batch.finish.tolist(), strict=True):
                if finish != RUNNING:
                    self.over(request)
        for failure in failed:
            self.over(failure.request)

    def hog(self, node: int, pages: Sequence[int], hold: bool) -> None:
        """Somebody who runs no steps holds ``pages``, or gives them back."""
        for page in pages:
            if hold and self._nodes[node].holders.get(page):
                raise Broken("page", f"page {page}, which a row holds, was given away")
            self._nodes[node].holders[page] = int(hold)
            self._nodes[node].written.pop(page, None)

    # ---- a plan ------------------------------------------------------------------------------

    def plan(self, plan: StepPlan, available: int, hogged: bool) -> Work:
        """Check ``plan`` and take it over. ``available`` pages of its node are promised to nobody.

        ``hogged``: somebody else holds pages of it. Raises Broken.
        """
        seq = plan.seq
        if seq != self._seq + 1:
            raise Broken("order", f"step {seq} follows step {self._seq}")
        if seq - self.landed > self._depth + 1:
            raise Broken("depth", f"{seq - self.landed} steps in flight at depth {self._depth}")
        self._seq = seq
        node = self._nodes[plan.node]
        self._drop(node, plan)
        self._bind(node, plan)
        self._grant(node, plan)
        work = self._rows(node, plan)
        self._budget(node, plan, work)
        self._left_out(node, plan, work, available, hogged)
        if len(self._nodes) > 1:
            self._round_robin(node, seq)
        return work

    def _drop(self, node: _Node, plan: StepPlan) -> None:
        seq = plan.seq
        for request in plan.drops.tolist():
            slot = node.slot_of.pop(request, None)
            if slot is None:
                raise Broken("drop", f"step {seq} drops request {request}, which has no slot")
            row = node.rows.pop(slot)
            node.over.discard(request)
            node.left_slots[slot] = seq
            for page in row.pages:
                node.holders[page] -= 1
                node.left_pages[page] = seq
        if node.over:
            raise Broken("late drop", f"step {seq} does not drop request {min(node.over)}, which is over")

    def _bind(self, node: _Node, plan: StepPlan) -> None:
        for bind in plan.binds:
            if bind.slot in node.rows or node.left_slots.get(bind.slot, 0) > self.landed:
                raise Broken(
                    "slot",
                    f"step {plan.seq} binds slot {bind.slot} before the last step that names it landed",
                )
            if bind.request in node.slot_of:
                raise Broken("slot", f"step {plan.seq} binds request {bind.request} a second time")
            node.rows[bind.slot] = _Row(bind.request, bind.length, bind.accepted, bind.cap, bind.late)
            node.slot_of[bind.request] = bind.slot

    def _grant(self, node: _Node, plan: StepPlan) -> None:
        """Append granted pages; pages of rows that have not run yet are judged with their first chunk."""
        if not plan.grant_slot.size:
            return
        pages_of_row = node.limits.pages_of(node.limits.max_seq_len)
        for slot, page in zip(plan.grant_slot.tolist(), plan.grant_page.tolist(), strict=True):
            row = node.rows.get(slot)
            if row is None or not 0 <= page < node.limits.pages:
                raise Broken("grant", f"step {plan.seq} grants page {page} to slot {slot}")
            row.pages.append(page)
            if len(row.pages) > pages_of_row:
                raise Broken("grant", f"step {plan.seq}: slot {slot} has {len(row.pages)} pages")
            if row.started:
                self._take(node, plan.seq, slot, page)

    def _take(self, node: _Node, seq: int, slot: int, page: int) -> None:
        """``page`` is new to ``slot``: nobody holds it, and the last step that names it has landed."""
        if node.holders.get(page):
            raise Broken("page", f"step {seq} gives page {page}, which a row holds, to slot {slot}")
        if node.left_pages.get(page, 0) > self.landed:
            raise Broken(
                "page",
                f"step {seq} gives page {page} to slot {slot} before step {node.left_pages[page]} has landed",
            )
        node.holders[page] = 1
        node.written.pop(page, None)

    def _start(self, node: _Node, seq: int, slot: int, row: _Row, start: int) -> None:
        """The first chunk of ``slot`` begins at ``start``: the pages before it are leased, the others new."""
        size = node.limits.page_size
        shared = start // size
        if start % size or shared > len(row.pages):
            raise Broken("lease", f"step {seq}: slot {slot} starts at {start} with {len(row.pages)} pages")
        row.started = True
        row.shared = shared
        row.progress = start
        for page in row.pages[:shared]:
            if node.written.get(page, seq) > self.landed:
                raise Broken("lease", f"step {seq} leases page {page} to slot {slot} before it has landed")
            node.holders[page] = node.holders.get(page, 0) + 1
        for page in row.pages[shared:]:
            self._take(node, seq, slot, page)

    def _rows(self, node: _Node, plan: StepPlan) -> Work:
        seq, size = plan.seq, node.limits.page_size
        decodes = tokens = context = 0
        starts = plan.chunk_starts.tolist() or [-1] * plan.slot.size
        ends = plan.chunk_ends.tolist() or starts
        columns = (
            plan.slot.tolist(),
            plan.request.tolist(),
            plan.source.tolist(),
            plan.counter.tolist(),
            plan.late_sample.tolist(),
        )
        for slot, request, source, counter, late, start, end in zip(*columns, starts, ends, strict=True):
            row = node.rows.get(slot)
            if row is None or row.request != request:
                raise Broken("owner", f"step {seq} names request {request} in slot {slot}")
            if source == CARRY:
                if not row.ready or counter != row.generated:
                    raise Broken(
                        "counter", f"step {seq}: slot {slot} decodes token {counter} of {row.generated}"
                    )
                row.generated += 1
                decodes += 1
                end = row.base + counter + (late == LATE_RUN)
                context += end
                first = (end - 1) // size if not late or late == LATE_RUN else -(-end // size)
            else:
                if start < 0:
                    start, end = 0, row.length
                if not row.started:
                    self._start(node, seq, slot, row, start)
                if start != row.progress or not start < end <= row.length:
                    raise Broken(
                        "chunk",
                        f"step {seq}: slot {slot} runs [{start}, {end}) of {row.length} at {row.progress}",
                    )
                row.progress = end
                tokens += end - start
                context += (end - start) * end
                first = start // size
                if end == row.length and not row.late:
                    row.generated += 1
            pages = row.pages[first : -(-end // size)]
            if len(row.pages) * size < end:
                raise Broken("page", f"step {seq}: slot {slot} runs to {end} with {len(row.pages)} pages")
            for page in pages:
                if node.holders[page] != 1:
                    raise Broken("page", f"step {seq}: slot {slot} writes page {page}, which is shared")
                node.written[page] = seq
        return Work(decodes, tokens, plan.slot.size, context)

    def _budget(self, node: _Node, plan: StepPlan, work: Work) -> None:
        limits = node.limits
        most = limits.batch_tokens
        total = work.decodes + work.chunk_tokens
        alone = work.rows - work.decodes == 1 and not limits.chunked  # a prompt that runs whole runs somehow
        if total > most and not alone:
            raise Broken("budget", f"step {plan.seq} runs {total} tokens of {most}")
        if work.decodes and limits.prefill_cap and work.chunk_tokens > limits.prefill_cap and not alone:
            raise Broken("budget", f"step {plan.seq} prefills {work.chunk_tokens} of {limits.prefill_cap}")
        if work.decodes and work.rows > work.decodes and not limits.mixes:
            raise Broken("mix", f"step {plan.seq} mixes chunks and decodes")

    def _left_out(self, node: _Node, plan: StepPlan, work: Work, available: int, hogged: bool) -> None:
        """With room in the budget no ready decode row is left out, but for want of a page."""
        limits = node.limits
        if not limits.mixes and work.rows > work.decodes:
            return
        rode = set(plan.slot.tolist())
        room = limits.batch_tokens - work.decodes - work.chunk_tokens
        for slot, row in node.rows.items():
            if slot in rode or not row.ready or row.late:  # who draws late waits for what it drew
                continue
            if row.base + row.generated > len(row.pages) * limits.page_size:
                if available > 0 and not plan.drops.size and not hogged:
                    raise Broken(
                        "page", f"step {plan.seq} leaves slot {slot} without one of {available} pages"
                    )
                continue
            if room > 0:
                raise Broken("left out", f"step {plan.seq} leaves slot {slot} out, which is ready")

    def _round_robin(self, planned: _Node, seq: int) -> None:
        """A node with a row to decode waits for one step of each other node at most."""
        planned.passed = 0
        for index, node in enumerate(self._nodes):
            if node is planned:
                continue
            size = node.limits.page_size
            rows = node.rows.values()
            if any(r.ready and not r.late and r.base + r.generated <= len(r.pages) * size for r in rows):
                node.passed += 1
                if node.passed >= len(self._nodes):
                    raise Broken("round robin", f"step {seq} is the {node.passed}th that passes node {index}")

    def idle(self) -> None:
        """Nothing is held, bound or due."""
        for index, node in enumerate(self._nodes):
            if node.rows or any(node.holders.values()):
                held = sum(map(bool, node.holders.values()))
                raise Broken("idle", f"node {index} is idle with {len(node.rows)} rows and {held} pages")
