"""MicroScheduler: decides every step of a decider, once, as a StepPlan.

Plain and synchronous: fed with admissions, aborts and landed results, it returns plans and tokens.
It reads no clock and does no I/O beyond writing plans into the step slots it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mstar.engine.stop import TokenStop
from mstar.messages.request import Admit
from mstar.messages.step import FLAG_LOGPROBS, SAMPLES, SLOT, Bind, Input, StepDraft, StepPlan, StepTail
from mstar.messages.tokens import LENGTH, RUNNING, STOP, RowFailed, TokenBatch
from mstar.worker.decodes import DecodeRows, Decodes
from mstar.worker.ledger import Ledger
from mstar.worker.limits import Limits
from mstar.worker.pipeline import Pipeline
from mstar.worker.prefill import Prefill
from mstar.worker.slots import Slots
from mstar.worker.waiting import Waiting, WaitingLine, bind_bytes
from shm.errors import SlabExhausted
from shm.slab import SlabHandle
from shm.steps import StepSlot

__all__ = [
    "DECODE",
    "MIXED",
    "PREFILL",
    "Landed",
    "Limits",
    "MicroScheduler",
    "Replays",
    "SchedulerStatistics",
    "StepResult",
]

PREFILL, DECODE, MIXED = 0, 1, 2
"""Walks of a language model's one node; MIXED labels a step whose rows run both."""

PROMPTS_SLAB, REPLAYS_SLAB = 0, 1
"""The slabs a bind's inputs may lie in: the gateway's prompts, the leader's own replays."""


class Replays(Protocol):
    """Where the leader puts the tokens of a preempted row for every rank to read (shm.slab.SlabOwner)."""

    def lease(self, nbytes: int) -> SlabHandle: ...
    def view(self, handle: SlabHandle) -> memoryview: ...
    def release(self, handle: SlabHandle) -> None: ...


class StepResult(NamedTuple):
    """What a landed step left on the host, indexed by slot.

    ``tokens`` int32 [slots]; when asked for ``logprob`` float32 [slots], ``top_ids`` int32 [slots, 20],
    ``top_logprobs`` float32 [slots, 20]. ``failed`` is the sentence to tell all rows of a failed step,
    ``failed_slots`` what to tell single rows.
    """

    tokens: NDArray[np.int32]
    logprob: NDArray[np.float32] | None = None
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    failed: str | None = None
    failed_slots: Mapping[int, str] = MappingProxyType({})


class Landed(NamedTuple):
    """What a landed step means for the owners of its rows."""

    batch: TokenBatch | None
    failed: list[RowFailed]


class SchedulerStatistics(NamedTuple):
    """Counts since the start, and gauges of this moment."""

    running: int
    waiting: int
    planned_steps: int
    landed_steps: int
    finished: int
    aborted: int
    preempted: int
    refused: int
    failed: int
    stale_results: int
    generated_tokens: int
    prompt_tokens: int


class _Step(NamedTuple):
    """A step in flight: its rows whose token leaves with it, and the slots of those that only prefill.

    ``ends`` is how many rows had ended before their budget when it was planned.
    """

    rows: DecodeRows
    others: list[int]
    ends: int
    logprobs: bool


_ONE: NDArray[np.int32] = np.array(1, np.int32)

_Return = int | Callable[[], None]


class MicroScheduler:
    """The decider of a cell's steps over one language-model node.

    ``open_slot(seq)`` returns the step slot to write plan ``seq`` into. The caller launches and
    publishes what ``plan`` returns, and calls ``land`` with the result of the oldest step.
    """

    def __init__(self, limits: Limits, open_slot: Callable[[int], StepSlot], replays: Replays) -> None:
        self.limits = limits
        self.slots = Slots(limits.slots, limits.max_seq_len, limits.page_size)
        self.ledger = Ledger(limits.pages)
        self.pipeline: Pipeline[_Step, _Return] = Pipeline(limits.depth)
        self._floor, self._bind_bytes = limits.chunk_floor, limits.bind_bytes
        self._open_slot = open_slot
        self._replays = replays
        self._line = WaitingLine(limits)
        self._prefill = Prefill(limits, self.slots, self.ledger, PREFILL)
        self._decodes = Decodes(limits, self.slots, self.ledger, DECODE)
        self._stop = TokenStop()
        self._running: NDArray[np.int8] = np.zeros(limits.slots, np.int8)
        self._running.flags.writeable = False
        self._slot_of: dict[int, int] = {}
        self._messages: dict[int, Admit] = {}
        self._drops: list[int] = []
        self._leaving: set[int] = set()
        self._preempting: set[int] = set()
        self._returning_pages = 0
        self._scored = 0
        self._ends = 0
        self._refusals: list[RowFailed] = []
        self._finished = self._aborted = self._preempted = self._refused = self._failed = 0
        self._stale = self._generated = self._prompted = 0

    # ---- what comes in -----------------------------------------------------------------------

    def admit(self, message: Admit, tokens: NDArray[np.int32], release: Callable[[], None]) -> None:
        """Queue a sequence; ``tokens`` int32 [prompt + accepted] is readable until ``release`` is called."""
        refusal = self._line.join(message, tokens, release)
        if refusal is not None:
            status, reason = refusal
            self._refused += 1
            release()
            self._refusals.append(RowFailed(message.request, message.attempt, reason, status))

    def abort(self, request: int) -> None:
        """Forget ``request``: its row leaves with the next plan; unknown ids are ignored."""
        slot = self._slot_of.get(request)
        if slot is not None:
            self._aborted += 1
            self._ends += 1
            self._end(slot)
        elif self._line.remove(request):
            self._aborted += 1

    def abort_all(self) -> None:
        """Forget every request: their owner is gone."""
        for request in (*self._slot_of, *self._line.requests()):
            self.abort(request)

    # ---- one step ----------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run or the pipeline is full."""
        pipeline = self.pipeline
        if pipeline.full or not (self._slot_of or self._drops or self._line):
            return None
        seq = pipeline.next_seq
        draft = StepDraft(seq, self._open_slot(seq))
        self._decodes.grow(draft, self._make_room)
        self._write_drops(draft)
        rows = self._decodes.write(draft)
        decodes = draft.n_rows
        others: list[int] = []
        binds: list[Bind] = []
        if self._line or self._prefill:
            binds = self._bind_waiting(seq, self.limits.batch_tokens - decodes)
            if self._prefill:
                rows, others = self._write_chunks(draft, rows)
        n = draft.n_rows
        if not n and not draft.n_drops and not binds:
            return None
        logprobs = self._scored > 0 and bool(np.count_nonzero(self.slots.logprobs[rows.slots]))
        plan = draft.seal(
            node=0,
            walk=DECODE if n == decodes else MIXED if decodes else PREFILL,
            bucket=0,
            flags=FLAG_LOGPROBS if logprobs else 0,
            chunked=n > decodes,
            tail=StepTail(tuple(binds)) if binds else None,
        )
        pipeline.push(seq, _Step(rows, others, self._ends, logprobs))
        if self._drops:
            for slot in self._drops:
                pipeline.retire(seq, slot)
            self._drops.clear()
        return plan

    def land(self, seq: int, result: StepResult) -> Landed:
        """Step ``seq``, the oldest in flight, has landed: stop checks, what returns, what to emit."""
        step, back = self.pipeline.land(seq)
        failed, self._refusals = self._refusals, []
        batch = None
        if result.failed is not None:
            failed += self._fail((*step.rows.slots.tolist(), *step.others), result.failed)
        else:
            for slot, message in result.failed_slots.items():
                failed += self._fail((slot,), message)
            if step.rows.slots.size:
                batch = self._settle(step, result)
        for item in back:
            if callable(item):
                item()
            else:
                self._return_slot(item)
        return Landed(batch, failed)

    def take_refusals(self) -> list[RowFailed]:
        """Refusals to send now, when no step is about to land."""
        refusals, self._refusals = self._refusals, []
        return refusals

    # ---- the parts of a plan -----------------------------------------------------------------

    def _make_room(self, pages: int) -> None:
        """Preempt the youngest rows until ``pages`` pages are on their way back; the oldest always stays."""
        while self._returning_pages + self.ledger.available < pages:
            candidates = [slot for slot in self._slot_of.values() if slot not in self._leaving]
            if len(candidates) < 2:
                return
            victim = max(candidates, key=self.slots.order.__getitem__)
            self._preempted += 1
            self._preempting.add(victim)
            self._leave(victim)

    def _write_drops(self, draft: StepDraft) -> None:
        drops = self._drops
        if drops:
            owner = self.slots.owner
            for place, slot in enumerate(drops):
                draft.drops[place] = owner[slot]
            draft.n_drops = len(drops)

    def _bind_waiting(self, seq: int, room: int) -> list[Bind]:
        """Admit who waits, in order, while slots, pages and the step have room.

        Nobody enters while a row lacks a page, or while a preempted row is still on its way back to
        the line: the pages that it left are not for those behind it.
        """
        binds: list[Bind] = []
        if room < 1 or self._decodes.stalled or self._preempting:
            return binds
        most = max(1, room // self._floor)
        tail = self._bind_bytes
        while self.slots.free and len(self._prefill) < most:
            entry = self._line.head()
            if entry is None:
                break
            tail -= bind_bytes(entry.message)
            horizon = self._horizon(entry)
            if tail < 0 or horizon > self.ledger.available:
                break
            source = self._publish(entry, seq)
            if source is None:
                break
            binds.append(self._bind(entry, source, horizon))
            self._line.advance()
        return binds

    def _horizon(self, entry: Waiting) -> int:
        """Pages for the whole input and the next tokens of ``entry``."""
        message, size = entry.message, entry.tokens.size
        most = message.prompt_tokens + message.max_tokens - 1
        return self.limits.pages_of(max(size, min(size + self.limits.horizon_tokens, most)))

    def _publish(self, entry: Waiting, seq: int) -> Input | None:
        """Where every rank reads the input of ``entry`` until step ``seq`` has landed; None: no room now."""
        if entry.release is not None:
            self.pipeline.retire(seq, entry.release)
            return Input(0, PROMPTS_SLAB, entry.message.prompt)
        replays, tokens = self._replays, entry.tokens
        try:
            handle = replays.lease(tokens.nbytes)
        except SlabExhausted:
            return None
        replays.view(handle)[: tokens.nbytes] = tokens.view(np.uint8).data
        self.pipeline.retire(seq, lambda: replays.release(handle))
        return Input(0, REPLAYS_SLAB, handle)

    def _bind(self, entry: Waiting, source: Input, horizon: int) -> Bind:
        """Put ``entry`` into the lowest free slot."""
        message, slots, total = entry.message, self.slots, entry.tokens.size
        sampling = message.sampling
        slot = slots.take()
        slots.owner[slot] = message.request
        slots.attempt[slot] = message.attempt
        slots.live[slot] = True
        slots.base[slot] = message.prompt_tokens
        slots.planned[slot] = entry.accepted
        slots.cap[slot] = message.max_tokens
        slots.horizon[slot] = horizon
        slots.order[slot] = entry.order
        slots.history[slot, :total] = entry.tokens
        slots.history_base[slot] = slot * slots.max_tokens + message.prompt_tokens
        if sampling.logprobs >= 0:
            slots.logprobs[slot] = True
            self._scored += 1
        self.ledger.promise(horizon)
        self._stop.bind(slot, message.stop_ids)
        self._slot_of[message.request] = slot
        self._messages[slot] = message
        self._prefill.start(slot, total)
        self._prompted += total
        return Bind(
            message.request,
            slot,
            message.attempt,
            total,
            entry.accepted,
            message.max_tokens,
            (source,),
            sampling,
            message.stop_ids,
            message.min_tokens,
        )

    def _write_chunks(self, draft: StepDraft, rows: DecodeRows) -> tuple[DecodeRows, list[int]]:
        """Chunks in the room decodes left: the rows whose token leaves, now with final chunks, and others."""
        first = draft.n_rows
        finals = self._prefill.write(draft, self.limits.batch_tokens - first)
        n = draft.n_rows
        columns = draft.rows
        others: list[int] = columns[SLOT, first:n].tolist()
        if not finals:
            return rows, others
        ending = [first + place for place, slot in enumerate(finals) if not self._decodes.start(slot)]
        places = columns[SAMPLES, :n].nonzero()[0]
        slots = columns[SLOT][places].astype(np.int64)
        rows = DecodeRows(
            slots,
            draft.request[places],
            self.slots.planned[slots] - _ONE,
            np.append(rows.ending, ending).astype(np.int64) if ending else rows.ending,
        )
        return rows, others

    # ---- landing -----------------------------------------------------------------------------

    def _settle(self, step: _Step, result: StepResult) -> TokenBatch | None:
        """Take the step's tokens: stop checks over the live rows, the batch for their owners."""
        slots = self.slots
        rows, request, index, ending = step.rows
        n = rows.size
        codes = self._running[:n]
        if ending.size:
            codes = codes.copy()
            codes[ending] = LENGTH
        if self._ends != step.ends:
            live = slots.live[rows]
            rows, request, index, codes = rows[live], request[live], index[live], codes[live]
            self._stale += n - rows.size
            n = rows.size
            if not n:
                return None
        tokens = result.tokens[rows]
        slots.flat_history[slots.history_base[rows] + index] = tokens
        stopped = self._stop.hits(rows, tokens)
        if stopped:
            self._ends += len(stopped)
            codes = codes.copy()
            codes[stopped] = STOP
        self._generated += n
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
            for slot in rows[codes != RUNNING].tolist():
                self._finished += 1
                self._end(slot)
        return batch

    def _fail(self, rows: Iterable[int], message: str) -> list[RowFailed]:
        """End the rows in these slots that still count."""
        slots = self.slots
        failed = []
        for slot in rows:
            if slots.live[slot]:
                self._failed += 1
                self._ends += 1
                failed.append(RowFailed(int(slots.owner[slot]), int(slots.attempt[slot]), message))
                self._end(slot)
        return failed

    def _end(self, slot: int) -> None:
        """Nothing of ``slot`` counts any more; it leaves with the next plan unless it is leaving already."""
        self.slots.live[slot] = False
        del self._slot_of[int(self.slots.owner[slot])]
        if slot not in self._leaving:
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        """Drop ``slot`` in the next plan and take back what was only promised to it."""
        slots = self.slots
        self._decodes.leave(slot)
        self._prefill.leave(slot)
        pages = int(slots.pages[slot])
        self.ledger.withdraw(int(slots.horizon[slot]) - pages)
        slots.horizon[slot] = pages
        self._returning_pages += pages
        self._leaving.add(slot)
        self._drops.append(slot)

    def _return_slot(self, slot: int) -> None:
        """The last step that names ``slot`` has landed: all of it is free; a preempted row queues again."""
        slots = self.slots
        message = self._messages.pop(slot)
        self._scored -= message.sampling.logprobs >= 0
        self._stop.release(slot)
        if slots.live[slot]:
            accepted = int(slots.planned[slot])  # whatever was planned for it has landed
            tokens = slots.history[slot, : message.prompt_tokens + accepted].copy()
            self._line.rejoin(Waiting(int(slots.order[slot]), message, tokens, accepted, None))
            del self._slot_of[message.request]
        pages = int(slots.pages[slot])
        self.ledger.give(slots.table[slot, :pages])
        self._returning_pages -= pages
        self._leaving.discard(slot)
        self._preempting.discard(slot)
        slots.give(slot)

    # ---- figures -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, leaves or is in flight: free pages equal the total."""
        return not (self._slot_of or self._line or self._drops or self.pipeline.in_flight)

    def statistics(self) -> SchedulerStatistics:
        """Counts since the start and gauges of this moment."""
        return SchedulerStatistics(
            running=len(self._slot_of),
            waiting=len(self._line),
            planned_steps=self.pipeline.planned,
            landed_steps=self.pipeline.landed,
            finished=self._finished,
            aborted=self._aborted,
            preempted=self._preempted,
            refused=self._refused,
            failed=self._failed,
            stale_results=self._stale,
            generated_tokens=self._generated,
            prompt_tokens=self._prompted,
        )
