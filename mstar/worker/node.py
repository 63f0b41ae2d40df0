"""NodeScheduler: the rows of one autoregressive node of a decider, and what each of its steps runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.engine.stop import TokenStop
from mstar.messages.prefix import DIGEST_BYTES
from mstar.messages.request import Admit
from mstar.messages.step import (
    FLAG_LOGPROBS,
    LATE,
    SAMPLES,
    SLOT,
    Bind,
    Input,
    Mask,
    StepDraft,
    StepPlan,
    StepTail,
)
from mstar.messages.tokens import LENGTH, RUNNING, STOP, RowFailed, TokenBatch
from mstar.model.graphs import WALKS
from mstar.worker.budget import StepBudget, StepWork
from mstar.worker.decodes import NO_ROWS, DecodeRows, Decodes
from mstar.worker.departures import Departures
from mstar.worker.entry import Entry, Replays
from mstar.worker.filing import Filing
from mstar.worker.late import Constraint, LateRows
from mstar.worker.ledger import Ledger
from mstar.worker.limits import Limits
from mstar.worker.outcome import Landed, StepResult
from mstar.worker.pipeline import Pipeline
from mstar.worker.prefill import Chunk, Prefill
from mstar.worker.slots import Slots
from mstar.worker.waiting import Waiting, WaitingLine

__all__ = ["DECODE", "MIXED", "PREFILL", "Drawing", "NodeCounts", "NodeScheduler", "NodeStep"]

PREFILL, DECODE, MIXED = WALKS.prefill, WALKS.decode, WALKS.combined
"""Walks of a language model's node; MIXED labels a step whose rows run both."""


class NodeStep(NamedTuple):
    """A step in flight: its rows whose token leaves with it, and its chunks.

    ``ends`` is how many rows had ended before their budget when it was planned. Where a target sizes the
    steps, ``work`` is what it costs and ``decodes`` the part of that which decodes.
    """

    rows: DecodeRows
    chunks: list[Chunk]
    ends: int
    logprobs: bool
    work: StepWork | None
    decodes: StepWork


class NodeCounts:
    """Counts of one node since the start."""

    __slots__ = (
        "aborted",
        "cached_tokens",
        "failed",
        "finished",
        "generated",
        "preempted",
        "prompted",
        "refused",
        "stale",
    )

    def __init__(self) -> None:
        self.finished = self.aborted = self.preempted = self.refused = self.failed = 0
        self.stale = self.generated = self.prompted = self.cached_tokens = 0


_ONE: NDArray[np.int32] = np.array(1, np.int32)
_NOTHING_KNOWN = (None, StepWork(0, 0, 0))
"""The work of a step where no target sizes the steps."""

Drawing = tuple[tuple[int, int], ...]
"""The (slot, request) of the rows that draw late in a step."""

Returned = tuple["NodeScheduler", int]


class NodeScheduler:
    """Decides what a step of node ``index`` runs: who enters, who decodes, whose input runs how far.

    It writes into the draft it is given; ``pipeline`` is the cell's. ``salt`` is the key of the digests
    of full pages.
    """

    def __init__(
        self,
        index: int,
        limits: Limits,
        pipeline: Pipeline[tuple[NodeScheduler, NodeStep], Returned],
        replays: Replays,
        salt: bytes,
    ) -> None:
        self.index = index
        self.limits = limits
        self.slots = Slots(limits.slots, limits.max_seq_len, limits.page_size)
        self.ledger = Ledger(limits.pages, keep=limits.prefix_cache)
        self.line = WaitingLine(limits)
        self.counts = NodeCounts()
        self._pipeline = pipeline
        self._entry = Entry(limits, self.slots, self.ledger, self.line, pipeline, replays)
        self._departures = Departures(self.slots, self.ledger)
        self._prefill = Prefill(limits, self.slots, self.ledger, PREFILL)
        self._decodes = Decodes(limits, self.slots, self.ledger, DECODE)
        self._filing = Filing(limits, self.slots, self.ledger, salt)
        self._late = LateRows(limits)
        self._stop = TokenStop()
        target = limits.target_itl_ns
        self._budget = StepBudget(limits.batch_tokens, limits.chunk_floor, target) if target else None
        self._running: NDArray[np.int8] = np.zeros(limits.slots, np.int8)
        self._running.flags.writeable = False
        self._slot_of: dict[int, int] = {}
        self._messages: dict[int, Admit] = {}
        self._scored = 0
        self._ends = 0
        self._last_walk = DECODE

    # ---- who is here -------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something runs, waits or has to be dropped: a step may be planned."""
        return bool(self._slot_of or self._departures.due or self.line)

    @property
    def running(self) -> int:
        """Sequences in slots."""
        return len(self._slot_of)

    @property
    def page_refusals(self) -> int:
        """How often a newcomer or a row that decodes asked for pages that were not there."""
        return self._entry.refusals + self._decodes.stalls

    @property
    def squeezed_steps(self) -> int:
        """Steps whose target left no room for the smallest chunk, which ran all the same."""
        return 0 if self._budget is None else self._budget.statistics().squeezed

    def requests(self) -> list[int]:
        """Every sequence that runs or waits here."""
        return [*self._slot_of, *self.line.requests()]

    def constrain(self, request: int, constraint: Constraint) -> None:
        """The tokens of ``request``, which joins the line now, are held to ``constraint``."""
        self._late.constrain(request, constraint)

    def abort(self, request: int) -> bool:
        """Forget ``request``; False if it is not here."""
        slot = self._slot_of.get(request)
        if slot is not None:
            self._ends += 1
            self._end(slot)
        elif self.line.remove(request):
            self._late.forget(request)
        else:
            return False
        self.counts.aborted += 1
        return True

    # ---- one step ----------------------------------------------------------------------------

    def plan(self, draft: StepDraft) -> tuple[StepPlan, NodeStep] | None:
        """Fill ``draft``; None, and nothing written, when there is nothing to run."""
        seq = draft.seq
        decodes = self._decodes
        late = len(self._late) > 0
        if late:
            for slot in self._late.next():
                decodes.ride(slot)
        decodes.grow(draft, self._make_room)
        self._departures.write(draft)
        mixes = self.limits.mixes
        prefill_first = not mixes and self._last_walk == DECODE
        rows = NO_ROWS if prefill_first else decodes.write(draft, late=late)
        plain = draft.n_rows
        binds: list[Bind] = []
        chunks: list[Chunk] = []
        if (self.line.ready or self._prefill) and (mixes or not plain):
            room = self._room(rows)
            binds = self._bind_waiting(seq, room)
            if self._prefill:
                chunks = self._prefill.write(draft, room)
                if chunks:
                    rows = self._start_finals(draft, rows, chunks, plain)
        if prefill_first and not chunks:
            rows = decodes.write(draft, late=late)
            plain = draft.n_rows
        n = draft.n_rows
        if not n and not draft.n_drops and not binds:
            return None
        self._last_walk = walk = DECODE if n == plain else MIXED if plain else PREFILL
        masks = self._masks(draft, plain) if late else ()
        logprobs = self._scored > 0 and bool(np.count_nonzero(self.slots.logprobs[rows.slots]))
        plan = draft.seal(
            node=self.index,
            walk=walk,
            bucket=0,
            flags=FLAG_LOGPROBS if logprobs else 0,
            chunked=n > plain,
            tail=StepTail(tuple(binds), masks=masks) if binds or masks else None,
        )
        if self._departures.due:
            for slot in self._departures.planned():
                self._pipeline.retire(seq, (self, slot))
        work, decodes_work = _NOTHING_KNOWN if self._budget is None else self._work(plan, plain)
        return plan, NodeStep(rows, chunks, self._ends, logprobs, work, decodes_work)

    def land(self, step: NodeStep, result: StepResult) -> Landed:
        """``step``, the oldest of this node's in flight, has landed: stop checks, what to emit."""
        failed: list[RowFailed] = []
        batch = None
        for slot, message in result.failed_slots.items():  # also of rows that were only bound in this step
            failed += self._fail((slot,), message)
        if result.failed is not None:
            slots = (*step.rows.slots.tolist(), *(chunk.slot for chunk in step.chunks))
            failed += self._fail(slots, result.failed)
        else:
            if step.chunks:
                self._land_chunks(step.chunks)
            if step.rows.slots.size:
                batch = self._settle(step, result)
            if step.work is not None and self._budget is not None and step.work.rows:
                self._budget.observe(step.work, result.elapsed_ns, step.decodes)
        return Landed(batch, failed)

    def drawn(self, plan: Drawing, tokens: NDArray[np.int32]) -> None:
        """What the late rows of a step drew is on the host: they may ride again, if they go on."""
        slots = self.slots
        for slot, request in plan:
            if slots.owner[slot] != request:
                continue
            token = int(tokens[slot])
            if token >= 0:
                self._late.accept(request, token)
            over = token < 0 or token in self._messages[slot].stop_ids
            stays = slots.live[slot] and slot not in self._departures
            if stays and not over and slots.planned[slot] < slots.cap[slot]:
                self._late.ready(slot)

    # ---- the parts of a plan -----------------------------------------------------------------

    def _room(self, rows: DecodeRows) -> int:
        """Tokens that may prefill beside these decode rows."""
        limits = self.limits
        most, plain = limits.batch_tokens, rows.slots.size
        if plain:
            if self._budget is not None:
                most = self._budget.tokens(_decoding(self.slots, rows), self._prefill.past)
            if limits.prefill_cap:
                most = min(most, plain + limits.prefill_cap)
        return most - plain

    def _masks(self, draft: StepDraft, plain: int) -> tuple[Mask, ...]:
        """The masks of the rows that draw late, which are among the first ``plain``."""
        places = draft.rows[LATE, :plain].nonzero()[0]
        rows = zip(draft.rows[SLOT][places].tolist(), draft.request[places].tolist(), strict=True)
        return tuple(self._late.mask(slot, request) for slot, request in rows)

    def _work(self, plan: StepPlan, plain: int) -> tuple[StepWork, StepWork]:
        """What ``plan`` costs, and what its first ``plain`` rows do, which decode."""
        rows = plan.slot[:plain]
        context = int(self.slots.base[rows].sum()) + int(plan.counter[:plain].sum())
        decodes = StepWork(plain, plain, context)
        if not plan.chunk_starts.size:
            return decodes, decodes
        starts, ends = plan.chunk_starts[plain:], plan.chunk_ends[plain:]
        lengths = (ends - starts).astype(np.int64)
        tokens = plain + int(lengths.sum())
        return StepWork(tokens, plan.slot.size, context + int((lengths * ends).sum())), decodes

    def _make_room(self, pages: int) -> None:
        """Preempt the youngest rows until ``pages`` pages are on their way back; the oldest always stays."""
        departures = self._departures
        while departures.returning_pages + self.ledger.available < pages:
            candidates = [slot for slot in self._slot_of.values() if slot not in departures]
            if len(candidates) < 2:
                return
            victim = max(candidates, key=self.slots.order.__getitem__)
            self.counts.preempted += 1
            departures.preempting.add(victim)
            self._leave(victim)

    def _bind_waiting(self, seq: int, room: int) -> list[Bind]:
        """Let in who waits and fits.

        Nobody enters while a row lacks a page, or while a preempted row is still on its way back to
        the line: the pages that it left are not for those behind it.
        """
        binds: list[Bind] = []
        if room < 1 or self._decodes.stalled or self._departures.preempting:
            return binds
        entry = self._entry
        entry.open(room)
        while (entrant := entry.next(seq)) is not None:
            binds.append(self._bind(*entrant))
        return binds

    def _bind(self, waiting: Waiting, source: Input, horizon: int, leased: NDArray[np.int32]) -> Bind:
        """Put ``waiting`` into the lowest free slot, its first pages being ``leased``."""
        message, slots, total = waiting.message, self.slots, waiting.tokens.size
        sampling, cached = message.sampling, leased.size
        slot = slots.take()
        slots.owner[slot] = message.request
        slots.attempt[slot] = message.attempt
        slots.live[slot] = True
        slots.base[slot] = message.prompt_tokens
        slots.planned[slot] = waiting.accepted
        slots.cap[slot] = message.max_tokens
        slots.table[slot, :cached] = leased
        slots.pages[slot] = cached
        slots.horizon[slot] = horizon
        slots.order[slot] = waiting.order
        late = self._late.holds(message.request)
        slots.late[slot] = late
        slots.history[slot, :total] = waiting.tokens
        slots.history_base[slot] = slot * slots.max_tokens + message.prompt_tokens
        if sampling.logprobs >= 0:
            slots.logprobs[slot] = True
            self._scored += 1
        self.ledger.promise(horizon - cached)
        self._stop.bind(slot, message.stop_ids)
        self._filing.bind(slot, waiting.digests, cached, message.prompt_tokens)
        self._slot_of[message.request] = slot
        self._messages[slot] = message
        start = cached * self.limits.page_size
        self._prefill.start(slot, start, total)
        self.counts.prompted += total
        self.counts.cached_tokens += start
        return Bind(
            message.request,
            slot,
            message.attempt,
            total,
            waiting.accepted,
            message.max_tokens,
            (source,),
            sampling,
            message.stop_ids,
            message.min_tokens,
            late,
        )

    def _start_finals(
        self, draft: StepDraft, rows: DecodeRows, chunks: list[Chunk], first: int
    ) -> DecodeRows:
        """The rows whose token leaves, now with those whose input ends in this step."""
        ending: list[int] = []
        finals = 0
        for place, chunk in enumerate(chunks, first):
            if chunk.final and self.slots.late[chunk.slot]:
                self._late.ready(chunk.slot)
            elif chunk.final:
                finals += 1
                if not self._decodes.start(chunk.slot):
                    ending.append(place)
        if not finals:
            return rows
        n = draft.n_rows
        columns = draft.rows
        places = columns[SAMPLES, :n].nonzero()[0]
        slots = columns[SLOT][places].astype(np.int64)
        if ending and places.size < n:
            ending = np.searchsorted(places, ending).tolist()
        return DecodeRows(
            slots,
            draft.request[places],
            self.slots.planned[slots] - _ONE,
            np.append(rows.ending, ending).astype(np.int64) if ending else rows.ending,
        )

    # ---- landing -----------------------------------------------------------------------------

    def _land_chunks(self, chunks: list[Chunk]) -> None:
        live = self.slots.live
        for chunk in chunks:
            if live[chunk.slot]:
                self._filing.chunk(chunk.slot, chunk.end)
                if chunk.final:
                    self.line.call(int(self.slots.owner[chunk.slot]))

    def _settle(self, step: NodeStep, result: StepResult) -> TokenBatch | None:
        """Take the step's tokens: stop checks over the live rows, the batch for their owners."""
        slots, counts = self.slots, self.counts
        rows, request, index, ending = step.rows
        n = rows.size
        codes = self._running[:n]
        if ending.size:
            codes = codes.copy()
            codes[ending] = LENGTH
        if self._ends != step.ends:
            live = slots.live[rows]
            rows, request, index, codes = rows[live], request[live], index[live], codes[live]
            counts.stale += n - rows.size
            n = rows.size
            if not n:
                return None
        tokens = result.tokens[rows]
        slots.flat_history[slots.history_base[rows] + index] = tokens
        self._filing.decodes(rows, index)
        stopped = self._stop.hits(rows, tokens)
        if stopped:
            self._ends += len(stopped)
            codes = codes.copy()
            codes[stopped] = STOP
        counts.generated += n
        batch = TokenBatch(request, slots.attempt[rows], index, tokens, codes)
        if step.logprobs and result.logprob is not None:
            assert result.top_ids is not None
            assert result.top_logprobs is not None
            score = result.logprob[rows]
            score[~slots.logprobs[rows]] = np.nan
            batch = batch._replace(
                logprob=score, top_ids=result.top_ids[rows], top_logprobs=result.top_logprobs[rows]
            )
        if stopped or ending.size:
            over = codes != RUNNING
            for slot, before in zip(rows[over].tolist(), index[over].tolist(), strict=True):
                counts.finished += 1
                self._filing.row(slot, (int(slots.base[slot]) + before) // self.limits.page_size)
                self._end(slot)
        return batch

    def _fail(self, rows: Iterable[int], message: str) -> list[RowFailed]:
        """End the rows in these slots that still count."""
        slots = self.slots
        failed = []
        for slot in rows:
            if slots.live[slot]:
                self.counts.failed += 1
                self._ends += 1
                failed.append(RowFailed(int(slots.owner[slot]), int(slots.attempt[slot]), message))
                self._end(slot)
        return failed

    def _end(self, slot: int) -> None:
        """Nothing of ``slot`` counts any more; it leaves with the next plan unless it is leaving already."""
        self.slots.live[slot] = False
        request = int(self.slots.owner[slot])
        del self._slot_of[request]
        self.line.succeed(request)
        self._late.forget(request)
        if slot not in self._departures:
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        """``slot`` rides no more and is dropped with the next plan."""
        self._decodes.leave(slot)
        if self.slots.late[slot]:
            self._late.leave(slot)
        self._prefill.leave(slot)
        self._departures.leave(slot)

    def return_slot(self, slot: int) -> None:
        """The last step that names ``slot`` has landed: all of it is free; a preempted row queues again."""
        slots = self.slots
        message = self._messages.pop(slot)
        self._scored -= message.sampling.logprobs >= 0
        self._stop.release(slot)
        digests = self._filing.release(slot)
        if slots.live[slot]:
            accepted = int(slots.planned[slot])  # whatever was planned for it has landed
            tokens = slots.history[slot, : message.prompt_tokens + accepted].copy()
            if len(digests) < DIGEST_BYTES * (message.prompt_tokens // self.limits.page_size):
                digests = b""
            self.line.rejoin(Waiting(int(slots.order[slot]), message, tokens, digests, accepted, None))
            del self._slot_of[message.request]
        self._departures.returned(slot)
        slots.give(slot)


def _decoding(slots: Slots, rows: DecodeRows) -> StepWork:
    """What these decode rows cost in a step."""
    plain = rows.slots.size
    return StepWork(plain, plain, int(slots.base[rows.slots].sum()) + int(rows.counter.sum()))
