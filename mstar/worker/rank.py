"""RankActor: one rank of a cell. The loop below is the design: receive, plan, launch, collect, emit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from actors.actor import PeerEvent, PeerLost
from mstar.distributed.errors import CollectiveFailed
from mstar.messages.prefix import read_prompt
from mstar.messages.request import Abort, Admit, Control, control_decoder
from mstar.messages.step import StepPlan
from mstar.messages.tokens import RankReport, RowFailed, encode_event, encode_tokens
from mstar.worker.leader import FollowerFailed, Leader
from mstar.worker.member import CellMember
from mstar.worker.outcome import Landed
from mstar.worker.scheduler import MicroScheduler
from shm.errors import BadHandle, Poisoned
from shm.slab import SlabOwner, SlabUser
from shm.steps import StepWriter

if TYPE_CHECKING:
    from actors.context import Context

__all__ = ["RankActor"]

_log = logging.getLogger(__name__)

_REPORT_NS = 250_000_000
_FULL_RING_PAUSE = 0.001


class RankActor(CellMember):
    """Serves one gateway from one cell, which this rank leads; of more than one rank, the others follow."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._tokens_channel = "tokens/0"
        self._admissions = ctx.mailbox("admit/0", control_decoder, self._on_control)
        steps, replays = ctx.steps["steps/0"], ctx.slabs[self._replays_slab]
        if not isinstance(steps, StepWriter) or not isinstance(replays, SlabOwner):
            raise TypeError(f"{ctx.name} leads its cell: it writes the step ring and owns the replays slab")
        self._steps = steps
        self._replays = replays
        self._unsent: deque[list[bytes]] = deque()
        self._gateway_lives = True
        self._malformed = 0
        self._busy_ns = 0
        self._reported_at = 0
        self._reported: RankReport | None = None

    async def setup(self) -> None:
        await super().setup()
        self.scheduler = MicroScheduler(
            self.engine.limits, self._steps.begin, self._replays, salt=self.config.prefix_salt
        )
        layout = self._steps.ring.layout
        self.leader = Leader(self.scheduler, self.engine.executor, self._steps, layout.readers, layout.slots)
        if layout.readers:
            self.ctx.watch(lambda: self.leader.moved)

    async def run(self) -> None:
        ctx, leader = self.ctx, self.leader
        while not ctx.stopping:
            started = time.perf_counter_ns()
            self._admissions.drain()
            held = bool(self._unsent)
            plan = None if held else leader.plan()
            if plan is not None:
                await self._launch(plan)
            landed = leader.collect(flush=plan is None)
            if landed is not None:
                self._emit(landed)
            self._flush()
            self._report(idle=plan is None and landed is None)
            if plan is not None or landed is not None or (held and not self._unsent):
                self._busy_ns += time.perf_counter_ns() - started
                await asyncio.sleep(0)
            elif self._unsent:
                await asyncio.sleep(_FULL_RING_PAUSE)
            else:
                await ctx.wait()

    # ---- the parts of the loop ---------------------------------------------------------------

    async def _launch(self, plan: StepPlan) -> None:
        """Run ``plan``; what a follower posted is told instead of the collective that its end broke."""
        try:
            self.leader.launch(plan)
        except Exception as error:
            await self._give_way(error)
            self._blame(error)
            raise
        self.ctx.line.step = plan.seq

    def _blame(self, error: Exception) -> None:
        """Raise FollowerFailed for the follower whose error came before ``error``, if it was not ours."""
        if not isinstance(error, CollectiveFailed):
            return
        posted = [(reader, self._steps.error(reader)) for reader in range(self._steps.ring.layout.readers)]
        told = [(reader, text) for reader, text in posted if text is not None]
        # Who only met the broken collective too comes last.
        for reader, text in sorted(told, key=lambda found: CollectiveFailed.__name__ in found[1]):
            raise FollowerFailed(reader, text) from error

    def _on_control(self, message: Control) -> None:
        if isinstance(message, Abort):
            self.scheduler.abort(message.request)
            return
        if not self._gateway_lives:
            return  # found in the ring of a gateway that died: nobody is left to answer
        prompts = self.ctx.slabs[self._prompts_slab]
        if not isinstance(prompts, SlabUser):
            raise TypeError(f"the prompts of {self.ctx.name} belong to a gateway")
        try:
            block = read_prompt(
                prompts.view(message.prompt), message.prompt_tokens + message.accepted, message.hashes
            )
        except (BadHandle, ValueError) as error:
            self._malformed += 1
            self._send([encode_event(RowFailed(message.request, message.attempt, str(error)))])
            return
        self.scheduler.admit(message, block.tokens, block.digests, partial(self._give_back, prompts, message))
        for refusal in self.scheduler.take_refusals():
            self._send([encode_event(refusal)])

    def _give_back(self, prompts: SlabUser, message: Admit) -> None:
        """The prompt of ``message`` is read; a slab whose gateway died is gone with it."""
        try:
            prompts.give_back(message.prompt)
        except (BadHandle, Poisoned):
            _log.debug("the prompt of request %d was given back to a gateway that is gone", message.request)

    def _emit(self, landed: Landed) -> None:
        if landed.batch is not None:
            self._send([bytes(part) for part in encode_tokens(landed.batch)])
        for failure in landed.failed:
            self._send([encode_event(failure)])

    # ---- to the gateway ----------------------------------------------------------------------

    def _send(self, parts: list[bytes]) -> None:
        """Send a record, or keep it while the ring is full; nothing more is planned until all are sent."""
        if self._gateway_lives:
            self._unsent.append(parts)
            self._flush()

    def _flush(self) -> None:
        ring = self.ctx.outbox[self._tokens_channel]
        unsent = self._unsent
        try:
            while unsent and ring.send_parts(unsent[0]):
                unsent.popleft()
        except Poisoned:
            unsent.clear()

    def _report(self, *, idle: bool) -> None:
        """Tell the gateway this rank's figures: four times a second at work, and once on going idle."""
        now = time.monotonic_ns()
        if not self._gateway_lives or (not idle and now - self._reported_at < _REPORT_NS):
            return
        report = self.report()
        if report != self._reported and not self._unsent:
            self._reported, self._reported_at = report, now
            self._send([encode_event(report)])

    def report(self) -> RankReport:
        """This rank's figures."""
        counts, pages = self.scheduler.statistics(), self.scheduler.nodes[0].ledger.statistics()
        runner = self.engine.runner.statistics()
        return RankReport(
            step=counts.landed_steps,
            running=counts.running,
            waiting=counts.waiting,
            slots=self.engine.limits.slots,
            pages_total=pages.total,
            pages_free=pages.free,
            preempted=counts.preempted,
            refused=counts.refused,
            finished=counts.finished,
            generated_tokens=counts.generated_tokens,
            prompt_tokens=counts.prompt_tokens,
            stale_results=counts.stale_results,
            step_seconds=runner.device_ns / 1e9,
            host_seconds=(self._busy_ns - runner.device_ns) / 1e9,
            pages_cached=pages.cached,
            evicted=pages.evicted,
            cached_tokens=counts.cached_tokens,
            page_refusals=counts.page_refusals,
            squeezed_steps=counts.squeezed_steps,
        )

    def on_peer(self, event: PeerEvent) -> None:
        """A gateway owns its requests: when it dies they end here, and its successor starts with none."""
        if isinstance(event, PeerLost):
            self._gateway_lives = False
            self._unsent.clear()
            self.scheduler.abort_all()
        else:
            self._gateway_lives = True
            self._reported = None
        self.ctx.wake()
