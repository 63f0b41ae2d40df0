"""MicroScheduler: decides every step of a decider, once, as a StepPlan.

Plain and synchronous: fed with admissions, aborts and landed results, it returns plans and tokens.
It reads no clock and does no I/O beyond writing plans into the step slots it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mstar.engine.stop import finish_codes
from mstar.messages.request import Admit
from mstar.messages.step import (
    CARRY,
    COUNTER,
    END,
    FLAG_LOGPROBS,
    HELD,
    INPUT,
    LATE,
    SAMPLES,
    SLOT,
    SOURCE,
    START,
    STRIDE,
    TOTAL,
    WALK,
    Bind,
    Input,
    StepDraft,
    StepPlan,
    StepTail,
)
from mstar.messages.tokens import RUNNING, RowFailed, TokenBatch
from mstar.worker.batch import split_fairly
from mstar.worker.ledger import Ledger
from mstar.worker.pipeline import Pipeline
from mstar.worker.slots import Slots
from shm.errors import SlabExhausted
from shm.slab import SlabHandle
from shm.steps import StepSlot

__all__ = [
    "DECODE",
    "HORIZON_TOKENS",
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

HORIZON_TOKENS = 256
"""How far ahead of what a row has generated its pages are promised."""

PROMPTS_SLAB, REPLAYS_SLAB = 0, 1
"""The slabs a bind's inputs may lie in: the gateway's prompts, the leader's own replays."""

_DECODE_ROW: NDArray[np.int32] = np.array([[DECODE], [CARRY], [1], [0]], np.int32)
"""Walk, source, samples and late_sample of every row that decodes."""

_BIND_BYTES = 192
_PAIR_BYTES = 16


class Limits(NamedTuple):
    """What bounds a decider: slots, tokens of one sequence, pages and their tokens, tokens a step."""

    slots: int
    max_seq_len: int
    pages: int
    page_size: int
    batch_tokens: int
    min_chunk_tokens: int
    depth: int
    max_waiting: int
    tail_bytes: int = 65536


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


class _Waiting(NamedTuple):
    """A sequence without a slot. ``tokens`` is prompt + accepted, int32; ``release`` gives its input back."""

    order: int
    message: Admit
    tokens: NDArray[np.int32]
    accepted: int
    release: Callable[[], None] | None


class _Prefilling:
    """A sequence in a slot whose input has not run to its end; ``start`` is where the next chunk begins."""

    __slots__ = ("slot", "start", "total")

    def __init__(self, slot: int, total: int) -> None:
        self.slot = slot
        self.start = 0
        self.total = total


class _Step(NamedTuple):
    """A step in flight: the slots whose token leaves with it (bool [high]) and all slots it runs."""

    sampled: NDArray[np.bool_]
    samples: int
    slots: NDArray[np.int32]
    logprobs: bool


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
        self._open_slot = open_slot
        self._replays = replays
        self._waiting: deque[_Waiting] = deque()
        self._preempted: list[_Waiting] = []
        self._prefill: list[_Prefilling] = []
        self._slot_of: dict[int, int] = {}
        self._messages: dict[int, Admit] = {}
        self._drops: list[int] = []
        self._leaving: set[int] = set()
        self._returning_pages = 0
        self._stalled = False
        self._scored = 0
        self._refusals: list[RowFailed] = []
        self._orders = 0
        self._finished = self._aborted = self._preemptions = self._refused = self._failed = 0
        self._stale = self._generated = self._prompted = 0

    # ---- what comes in -----------------------------------------------------------------------

    def admit(self, message: Admit, tokens: NDArray[np.int32], release: Callable[[], None]) -> None:
        """Queue a sequence; ``tokens`` int32 [prompt + accepted] is readable until ``release`` is called."""
        limits = self.limits
        most = message.prompt_tokens + message.max_tokens
        pages = self._pages(most - 1)
        if most > limits.max_seq_len:
            self._refuse(message, release, 400, f"{most} tokens asked for, at most {limits.max_seq_len} fit")
        elif pages > limits.pages:
            self._refuse(
                message,
                release,
                400,
                f"{pages} KV pages needed, the cache has {limits.pages}: shorten the request",
            )
        elif _bind_bytes(message) > limits.tail_bytes:
            self._refuse(message, release, 400, "the sampling parameters are too large for a step")
        elif len(self._waiting) >= limits.max_waiting:
            self._refuse(message, release, 429, f"{limits.max_waiting} requests already wait for a slot")
        else:
            self._orders += 1
            self._waiting.append(_Waiting(self._orders, message, tokens, message.accepted, release))

    def abort(self, request: int) -> None:
        """Forget ``request``: its row leaves with the next plan; unknown ids are ignored."""
        slot = self._slot_of.get(request)
        if slot is not None:
            self._aborted += 1
            self._end(slot)
            return
        for queue in (self._waiting, self._preempted):
            for entry in queue:
                if entry.message.request == request:
                    self._aborted += 1
                    queue.remove(entry)
                    if entry.release is not None:
                        entry.release()
                    return

    def abort_all(self) -> None:
        """Forget every request: their owner is gone."""
        for request in [
            *self._slot_of,
            *(entry.message.request for entry in (*self._waiting, *self._preempted)),
        ]:
            self.abort(request)

    # ---- one step ----------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run or the pipeline is full."""
        pipeline = self.pipeline
        if pipeline.full or not (self._slot_of or self._waiting or self._preempted or self._drops):
            return None
        seq = pipeline.next_seq
        draft = StepDraft(seq, self._open_slot(seq))
        self._grow(draft)
        self._write_drops(draft)
        sampled = self._write_decodes(draft, seq)
        decodes = draft.n_rows
        finals = 0
        binds: list[Bind] = []
        if self._prefill or self._waiting or self._preempted:
            sampled, finals, binds = self._write_chunks(draft, seq, sampled)
        n = draft.n_rows
        samples = decodes + finals
        if not n and not draft.n_drops and not binds:
            return None
        logprobs = self._scored > 0 and bool(np.count_nonzero(self.slots.logprobs[: sampled.size] & sampled))
        walk = DECODE if n == decodes else MIXED if decodes else PREFILL
        chunked = n > decodes
        plan = draft.seal(
            node=0,
            walk=walk,
            bucket=0,
            flags=FLAG_LOGPROBS if logprobs else 0,
            chunked=chunked,
            **({"tail": StepTail(tuple(binds))} if binds else {}),
        )
        pipeline.push(seq, _Step(sampled, samples, plan.slot.copy(), logprobs))
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
            failed += self._fail(step.slots.tolist(), result.failed)
        else:
            for slot, message in result.failed_slots.items():
                failed += self._fail((slot,), message)
            if step.sampled.size:
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

    def _grow(self, draft: StepDraft) -> None:
        """Give every riding row that reached its last page the next one; who gets none sits this step out."""
        slots = self.slots
        high = slots.high
        short = (
            slots.ride[:high] & (slots.position[:high] >= slots.pages[:high] * slots.page_size)
        ).nonzero()[0]
        if not short.size:
            self._stalled = False
            return
        held = slots.pages[short]
        if np.count_nonzero(held < slots.horizon[short]) == short.size:
            self._stalled = False
            self._grant(draft, short, self.ledger.take(short.size))
            return
        stalled: list[int] = []
        granted: list[int] = []
        for slot in sorted(short.tolist(), key=slots.order.__getitem__):
            if slots.pages[slot] < slots.horizon[slot] or self._extend(slot):
                granted.append(slot)
            else:
                stalled.append(slot)
        if granted:
            index = np.array(granted, np.int64)
            self._grant(draft, index, self.ledger.take(index.size))
        self._stalled = bool(stalled)
        if stalled:
            self._make_room(len(stalled))

    def _extend(self, slot: int) -> bool:
        """Move the horizon of ``slot`` on by what is available; False if there is nothing."""
        slots, ledger = self.slots, self.ledger
        last = self._pages(int(slots.base[slot]) + int(slots.cap[slot]) - 1)
        want = min(self._pages(HORIZON_TOKENS), last - int(slots.pages[slot]))
        more = min(want, ledger.available)
        if more < 1:
            return False
        ledger.promise(more)
        slots.horizon[slot] += more
        return True

    def _make_room(self, pages: int) -> None:
        """Preempt the youngest rows until ``pages`` pages are on their way back; the oldest always stays."""
        slots = self.slots
        while self._returning_pages + self.ledger.available < pages:
            candidates = [slot for slot in self._slot_of.values() if slot not in self._leaving]
            if len(candidates) < 2:
                return
            victim = max(candidates, key=slots.order.__getitem__)
            self._preemptions += 1
            self._leave(victim)

    def _grant(self, draft: StepDraft, index: NDArray[np.int64], pages: NDArray[np.int32]) -> None:
        """One page of ``pages`` to each slot of ``index`` (distinct)."""
        slots = self.slots
        count = index.size
        held = slots.pages[index]
        slots.table[index, held] = pages
        slots.pages[index] = held + 1
        at = draft.n_grants
        grants = draft.grants[:, at : at + count]
        grants[0], grants[1], grants[2] = index, 0, pages
        draft.n_grants = at + count

    def _write_drops(self, draft: StepDraft) -> None:
        for at, slot in enumerate(self._drops):
            draft.drops[at] = self.slots.owner[slot]
        draft.n_drops = len(self._drops)

    def _write_decodes(self, draft: StepDraft, seq: int) -> NDArray[np.bool_]:
        """Every row that is ready to decode and has its page. Returns the mask over slots of those rows."""
        slots = self.slots
        high = slots.high
        ride = slots.ride[:high]
        position = slots.position[:high]
        mask = ride.copy()
        if self._stalled:
            mask &= position < slots.pages[:high] * slots.page_size
        rows = mask.nonzero()[0]
        n = rows.size
        if n:
            planned = slots.planned[:high]
            columns = draft.rows
            every = n == high
            draft.request[:n] = slots.owner[:high] if every else slots.owner[rows]
            columns[SLOT, :n] = rows
            columns[COUNTER, :n] = planned if every else planned[rows]
            columns[WALK : LATE + 1, :n] = _DECODE_ROW
            planned += mask
            position += mask
            ride &= planned < slots.cap[:high]
        draft.n_rows = n
        return mask

    def _write_chunks(
        self, draft: StepDraft, seq: int, sampled: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], int, list[Bind]]:
        """Prompt chunks in the room decodes left: the mask, now with final chunks, their number, binds."""
        limits = self.limits
        n = draft.n_rows
        room = limits.batch_tokens - n
        binds = self._bind_waiting(draft, seq, room)
        if not self._prefill:
            return sampled, 0, binds
        floor = min(limits.min_chunk_tokens, limits.batch_tokens)
        shares = split_fairly([row.total - row.start for row in self._prefill], room, floor)
        if not any(shares):
            return sampled, 0, binds
        slots = self.slots
        if slots.high > sampled.size:
            sampled = np.concatenate((sampled, np.zeros(slots.high - sampled.size, bool)))
        columns = draft.rows
        columns[START : STRIDE + 1, :n] = -1
        finals = 0
        for row, share in zip(self._prefill, shares, strict=True):
            if not share:
                continue
            slot, start, total = row.slot, row.start, row.total
            end = start + share
            final = end == total
            need = self._pages(end) - int(slots.pages[slot])
            if need > 0:
                self._grant_chunk(draft, slot, need)
            draft.request[n] = slots.owner[slot]
            columns[SLOT, n] = slot
            columns[WALK, n] = PREFILL
            columns[SOURCE, n] = HELD if start else INPUT
            columns[COUNTER, n] = start
            columns[SAMPLES, n] = final
            columns[LATE, n] = 0
            columns[START, n] = start
            columns[END, n] = end
            columns[TOTAL, n] = total
            columns[STRIDE, n] = share
            row.start = end
            n += 1
            if final:
                slots.planned[slot] += 1
                slots.position[slot] = total
                slots.ride[slot] = slots.planned[slot] < slots.cap[slot]
                sampled[slot] = True
                finals += 1
        self._prefill = [row for row in self._prefill if row.start < row.total]
        draft.n_rows = n
        return sampled, finals, binds

    def _grant_chunk(self, draft: StepDraft, slot: int, need: int) -> None:
        slots = self.slots
        held = int(slots.pages[slot])
        pages = self.ledger.take(need)
        slots.table[slot, held : held + need] = pages
        slots.pages[slot] = held + need
        at = draft.n_grants
        grants = draft.grants[:, at : at + need]
        grants[0], grants[1], grants[2] = slot, 0, pages
        draft.n_grants = at + need

    def _bind_waiting(self, draft: StepDraft, seq: int, room: int) -> list[Bind]:
        """Admit waiting sequences, preempted ones first, while slots, pages and the step have room."""
        binds: list[Bind] = []
        floor = min(self.limits.min_chunk_tokens, self.limits.batch_tokens)
        tail = self.limits.tail_bytes - 64
        rows = max(1, room // floor) if room > 0 else 0
        while (self._preempted or self._waiting) and self.slots.free and not self._stalled:
            if len(self._prefill) >= rows:
                break
            queue: deque[_Waiting] | list[_Waiting] = self._preempted or self._waiting
            entry = queue[0]
            tail -= _bind_bytes(entry.message)
            horizon = self._horizon(entry)
            if tail < 0 or horizon > self.ledger.available:
                break
            bind = self._bind(entry, horizon, seq)
            if bind is None:
                break
            binds.append(bind)
            del queue[0]
        return binds

    def _bind(self, entry: _Waiting, horizon: int, seq: int) -> Bind | None:
        """Put ``entry`` into a slot; None if its tokens cannot be published now."""
        message, tokens, slots = entry.message, entry.tokens, self.slots
        release = entry.release
        if release is None:
            try:
                handle = self._replays.lease(tokens.nbytes)
            except SlabExhausted:
                return None
            self._replays.view(handle)[: tokens.nbytes] = tokens.view(np.uint8).data
            replays = self._replays

            def release() -> None:
                replays.release(handle)

            source = Input(0, REPLAYS_SLAB, handle)
        else:
            source = Input(0, PROMPTS_SLAB, message.prompt)
        slot = slots.take()
        total = tokens.size
        slots.owner[slot] = message.request
        slots.attempt[slot] = message.attempt
        slots.live[slot] = True
        slots.ride[slot] = False
        slots.logprobs[slot] = message.sampling.logprobs >= 0
        self._scored += message.sampling.logprobs >= 0
        slots.base[slot] = message.prompt_tokens
        slots.planned[slot] = slots.landed[slot] = entry.accepted
        slots.cap[slot] = message.max_tokens
        slots.position[slot] = slots.pages[slot] = 0
        slots.horizon[slot] = horizon
        slots.order[slot] = entry.order
        slots.set_stop_ids(slot, message.stop_ids)
        slots.history[slot, :total] = tokens
        self.ledger.promise(horizon)
        self._slot_of[message.request] = slot
        self._messages[slot] = message
        self._prefill.append(_Prefilling(slot, total))
        self._prompted += total
        self.pipeline.retire(seq, release)
        return Bind(
            message.request,
            slot,
            message.attempt,
            total,
            entry.accepted,
            message.max_tokens,
            (source,),
            message.sampling,
            message.stop_ids,
            message.min_tokens,
        )

    # ---- landing -----------------------------------------------------------------------------

    def _settle(self, step: _Step, result: StepResult) -> TokenBatch | None:
        """Take the step's tokens: stop checks over the live rows, the batch for their owners."""
        slots = self.slots
        high = step.sampled.size
        live = step.sampled
        live &= slots.live[:high]
        rows = live.nonzero()[0]
        n = rows.size
        self._stale += step.samples - n
        if not n:
            return None
        landed, tokens = slots.landed[:high], result.tokens[:high]
        landed += live
        codes = finish_codes(tokens, slots.stop_ids[:, :high], landed, slots.cap[:high])
        if n == high:  # every slot, the usual case of a busy decider: views instead of gathers
            owner, attempt, count = slots.owner[:high], slots.attempt[:high], landed
            length = slots.base[:high] + landed
        else:
            owner, attempt, count = slots.owner[rows], slots.attempt[rows], landed[rows]
            length = slots.base[rows] + count
            tokens, codes = tokens[rows], codes[rows]
        index = count - 1
        slots.history[rows, length - 1] = tokens
        self._generated += n
        batch = TokenBatch(owner, attempt, index, tokens, codes)
        if step.logprobs and result.logprob is not None:
            assert result.top_ids is not None
            assert result.top_logprobs is not None
            score = result.logprob[rows]
            score[~slots.logprobs[rows]] = np.nan
            batch = batch._replace(
                logprob=score, top_ids=result.top_ids[rows], top_logprobs=result.top_logprobs[rows]
            )
        if np.count_nonzero(codes):
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
                failed.append(RowFailed(int(slots.owner[slot]), int(slots.attempt[slot]), message))
                self._end(slot)
        return failed

    def _end(self, slot: int) -> None:
        """Nothing of ``slot`` counts any more; it leaves with the next plan unless it is leaving already."""
        slots = self.slots
        slots.live[slot] = False
        del self._slot_of[int(slots.owner[slot])]
        if slot not in self._leaving:
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        """Drop ``slot`` in the next plan and take back what was only promised to it."""
        slots = self.slots
        slots.ride[slot] = False
        self._prefill = [row for row in self._prefill if row.slot != slot]
        self.ledger.withdraw(int(slots.horizon[slot]) - int(slots.pages[slot]))
        slots.horizon[slot] = slots.pages[slot]
        self._returning_pages += int(slots.pages[slot])
        self._leaving.add(slot)
        self._drops.append(slot)

    def _return_slot(self, slot: int) -> None:
        """The last step that names ``slot`` has landed: all of it is free; a preempted row queues again."""
        slots = self.slots
        message = self._messages.pop(slot)
        self._scored -= message.sampling.logprobs >= 0
        if slots.live[slot]:
            total = int(slots.base[slot]) + int(slots.landed[slot])
            entry = _Waiting(
                int(slots.order[slot]),
                message,
                slots.history[slot, :total].copy(),
                int(slots.landed[slot]),
                None,
            )
            self._preempted.append(entry)
            self._preempted.sort(key=_order)
            del self._slot_of[message.request]
        pages = slots.pages[slot]
        self.ledger.give(slots.table[slot, :pages])
        self._returning_pages -= int(pages)
        self._leaving.discard(slot)
        slots.give(slot)

    def _refuse(self, message: Admit, release: Callable[[], None], status: int, reason: str) -> None:
        self._refused += 1
        release()
        self._refusals.append(RowFailed(message.request, message.attempt, reason, status))

    # ---- figures -----------------------------------------------------------------------------

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_size)

    def _horizon(self, entry: _Waiting) -> int:
        """Pages for the whole input and the next tokens of ``entry``."""
        message = entry.message
        most = message.prompt_tokens + message.max_tokens - 1
        return self._pages(max(entry.tokens.size, min(entry.tokens.size + HORIZON_TOKENS, most)))

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, leaves or is in flight: free pages equal the total."""
        return not (
            self._slot_of or self._waiting or self._preempted or self._drops or self.pipeline.in_flight
        )

    def statistics(self) -> SchedulerStatistics:
        """Counts since the start and gauges of this moment."""
        return SchedulerStatistics(
            running=len(self._slot_of),
            waiting=len(self._waiting) + len(self._preempted),
            planned_steps=self.pipeline.planned,
            landed_steps=self.pipeline.landed,
            finished=self._finished,
            aborted=self._aborted,
            preempted=self._preemptions,
            refused=self._refused,
            failed=self._failed,
            stale_results=self._stale,
            generated_tokens=self._generated,
            prompt_tokens=self._prompted,
        )


def _order(entry: _Waiting) -> int:
    return entry.order


def _bind_bytes(message: Admit) -> int:
    """An upper bound on what the bind of ``message`` takes in a step's tail."""
    return _BIND_BYTES + _PAIR_BYTES * len(message.sampling.logit_bias) + 5 * len(message.stop_ids)
