"""MicroScheduler: decides every step of a decider, once, as a StepPlan.

Plain and synchronous: fed with admissions, aborts and landed results, it returns plans and tokens.
It reads no clock and does no I/O beyond writing plans into the step slots it is given.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.messages.prefix import DIGEST_BYTES
from mstar.messages.request import Admit
from mstar.messages.step import StepDraft, StepPlan
from mstar.messages.tokens import RowFailed
from mstar.worker.entry import REPLAYS_SLAB, Replays
from mstar.worker.late import Constraint
from mstar.worker.limits import Limits
from mstar.worker.node import (
    DECODE,
    MIXED,
    PREFILL,
    Drawing,
    NodeScheduler,
    NodeStep,
    Returned,
)
from mstar.worker.outcome import Landed, StepResult
from mstar.worker.pipeline import Pipeline
from shm.steps import StepSlot

__all__ = [
    "DECODE",
    "MIXED",
    "PREFILL",
    "REPLAYS_SLAB",
    "Landed",
    "Limits",
    "MicroScheduler",
    "Replays",
    "SchedulerStatistics",
    "StepResult",
]

_MOST_EARLY_ABORTS = 1024


class SchedulerStatistics(NamedTuple):
    """Counts since the start, and gauges of this moment; ``cached_tokens`` of prompts did not run again.

    ``page_refusals``: how often a newcomer or a row that decodes asked for pages that were not there.
    """

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
    cached_tokens: int
    page_refusals: int
    squeezed_steps: int


class MicroScheduler:
    """The decider of a cell: one sequence of steps over all of its nodes.

    ``nodes`` bounds each node; the first one's ``depth`` is the cell's. ``open_slot(seq)`` returns the step
    slot to write plan ``seq`` into. The caller launches and publishes what ``plan`` returns, calls ``land``
    with the result of the oldest step, and ``read`` when every rank is done with a step.
    """

    def __init__(
        self,
        nodes: Limits | Sequence[Limits],
        open_slot: Callable[[int], StepSlot],
        replays: Replays,
        *,
        salt: bytes = b"",
    ) -> None:
        limits = (nodes,) if isinstance(nodes, Limits) else tuple(nodes)
        self.pipeline: Pipeline[tuple[NodeScheduler, NodeStep], Returned] = Pipeline(limits[0].depth)
        self.nodes = tuple(
            NodeScheduler(index, each, self.pipeline, replays, salt) for index, each in enumerate(limits)
        )
        self._turns = list(self.nodes)
        self._open_slot = open_slot
        self._refusals: list[RowFailed] = []
        self._early: OrderedDict[int, None] = OrderedDict()
        self._newest = 0
        self._drawing: deque[tuple[int, NodeScheduler, Drawing]] = deque()

    # ---- what comes in -----------------------------------------------------------------------

    def admit(
        self,
        message: Admit,
        tokens: NDArray[np.int32],
        digests: bytes,
        release: Callable[[], None],
        constraints: Sequence[Constraint] = (),
    ) -> None:
        """Queue a prompt's sequences; ``tokens`` int32 [prompt + accepted] is read until ``release`` is due.

        ``digests`` are those of its full pages, 16 bytes each. Where there are any, the further sequences
        wait until the first has run the prompt, whose pages they then share. ``constraints``, one for each
        sequence if any, have taken in what was accepted.
        """
        sequences = message.sequences()
        if not 0 <= message.node < len(self.nodes):
            reason = f"node {message.node} asked for, allowed are 0 to {len(self.nodes) - 1}"
            self._refuse(sequences, 400, reason)
            release()
            return
        node = self.nodes[message.node]
        if constraints and not node.limits.masks:
            self._refuse(sequences, 400, "this server has no room for masks, which the request's tokens need")
            release()
            return
        shared = len(digests) >= DIGEST_BYTES and tokens.size > node.limits.page_size
        give_back = release if len(sequences) == 1 else _after(len(sequences), release)
        first = None
        for place, sequence in enumerate(sequences):
            self._newest = max(self._newest, sequence.request)
            if sequence.request in self._early:
                del self._early[sequence.request]
                node.counts.aborted += 1
                give_back()
                continue
            refusal = node.line.join(sequence, tokens, digests, give_back, first=first)
            if refusal is not None:
                node.counts.refused += 1
                self._refuse((sequence,), *refusal)
                give_back()
                continue
            if constraints:
                node.constrain(sequence.request, constraints[place])
            if shared and first is None:
                first = sequence.request

    def abort(self, request: int) -> None:
        """Forget ``request``: its row leaves with the next plan. One that is still to come is not let in."""
        if any(node.abort(request) for node in self.nodes):
            return
        if request > self._newest:
            self._early[request] = None
            if len(self._early) > _MOST_EARLY_ABORTS:
                self._early.popitem(last=False)

    def abort_all(self) -> None:
        """Forget every request: their owner is gone."""
        for node in self.nodes:
            for request in node.requests():
                node.abort(request)

    def _refuse(self, sequences: Sequence[Admit], status: int, reason: str) -> None:
        self._refusals += (RowFailed(each.request, each.attempt, reason, status) for each in sequences)

    # ---- one step ----------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run or the pipeline is full.

        Nodes take turns: of those with something to run the one whose last step is longest ago.
        """
        pipeline = self.pipeline
        if pipeline.full:
            return None
        draft = None
        for node in self._turns:
            if node.busy:
                if draft is None:
                    seq = pipeline.next_seq
                    draft = StepDraft(seq, self._open_slot(seq))
                planned = node.plan(draft)
                if planned is not None:
                    plan, step = planned
                    pipeline.push(plan.seq, (node, step))
                    if plan.masks:
                        self._drawing.append((plan.seq, node, _drawing(plan)))
                    if len(self._turns) > 1:
                        self._turns.remove(node)
                        self._turns.append(node)
                    return plan
        return None

    @property
    def drawing(self) -> int | None:
        """The oldest step whose rows draw late and whose tokens ``drawn`` has not heard of."""
        return self._drawing[0][0] if self._drawing else None

    def drawn(self, seq: int, tokens: NDArray[np.int32] | None) -> None:
        """What rows drew late in step ``seq``, which is ``drawing``: int32 [slots], -1 for none.

        None: the step has failed, and its rows end when it lands.
        """
        _, node, rows = self._drawing.popleft()
        if tokens is not None:
            node.drawn(rows, tokens)

    def land(self, seq: int, result: StepResult) -> Landed:
        """Step ``seq``, the oldest in flight, has landed: stop checks, what returns, what to emit."""
        (node, step), back = self.pipeline.land(seq)
        landed = node.land(step, result)
        if self._refusals:
            landed = landed._replace(failed=[*self.take_refusals(), *landed.failed])
        for owner, slot in back:
            owner.return_slot(slot)
        return landed

    def read(self, seq: int) -> None:
        """Every rank is done with step ``seq``: the inputs that it named are given back."""
        self.pipeline.read(seq)

    def take_refusals(self) -> list[RowFailed]:
        """Refusals to send now, when no step is about to land."""
        refusals, self._refusals = self._refusals, []
        return refusals

    # ---- figures -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, leaves or is in flight: free and cached pages equal the total."""
        return not (
            self.pipeline.in_flight or self.pipeline.retiring or any(node.busy for node in self.nodes)
        )

    def statistics(self) -> SchedulerStatistics:
        """Counts since the start and gauges of this moment, over all nodes."""
        counts = [node.counts for node in self.nodes]
        return SchedulerStatistics(
            running=sum(node.running for node in self.nodes),
            waiting=sum(len(node.line) for node in self.nodes),
            planned_steps=self.pipeline.planned,
            landed_steps=self.pipeline.landed,
            finished=sum(each.finished for each in counts),
            aborted=sum(each.aborted for each in counts),
            preempted=sum(each.preempted for each in counts),
            refused=sum(each.refused for each in counts),
            failed=sum(each.failed for each in counts),
            stale_results=sum(each.stale for each in counts),
            generated_tokens=sum(each.generated for each in counts),
            prompt_tokens=sum(each.prompted for each in counts),
            cached_tokens=sum(each.cached_tokens for each in counts),
            page_refusals=sum(node.page_refusals for node in self.nodes),
            squeezed_steps=sum(node.squeezed_steps for node in self.nodes),
        )


def _drawing(plan: StepPlan) -> Drawing:
    rows = plan.late_sample.nonzero()[0]
    return tuple(
        (slot, request)
        for slot, request, samples in zip(
            plan.slot[rows].tolist(), plan.request[rows].tolist(), plan.samples[rows].tolist(), strict=True
        )
        if samples
    )


def _after(times: int, action: Callable[[], None]) -> Callable[[], None]:
    """``action`` once the result was called ``times`` times: the last reader of a prompt gives it back."""
    calls = itertools.count(1)

    def call() -> None:
        if next(calls) == times:
            action()

    return call
