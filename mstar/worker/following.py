"""FollowerActor: a rank that another one leads. The loop below is the design: take the next step, run it."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from mstar.worker.follower import Follower
from mstar.worker.member import CellMember
from shm.steps import StepReader
from shm.wait import spin_budget

if TYPE_CHECKING:
    from actors.context import Context

__all__ = ["FollowerActor"]

_SMOOTHING = 8


class FollowerActor(CellMember):
    """Runs the steps of its cell's leader, and speaks with nobody else."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        steps = ctx.steps["steps/0"]
        if not isinstance(steps, StepReader):
            raise TypeError(f"{ctx.name} follows: it reads the step ring of its cell")
        self._steps = steps
        self._cores = len(os.sched_getaffinity(0))
        self._gap_ns = 0

    async def setup(self) -> None:
        await super().setup()
        self.follower = Follower(self.engine.executor, self._steps)

    async def run(self) -> None:
        ctx, steps = self.ctx, self._steps
        idle_since = time.perf_counter_ns()
        while not ctx.stopping:
            if not steps.has_data():
                await ctx.wait(self._spin())
            waited = time.perf_counter_ns() - idle_since
            if await self._turn():
                ctx.line.step = steps.next - 1
                self._gap_ns += (waited - self._gap_ns) // _SMOOTHING
                idle_since = time.perf_counter_ns()
                await asyncio.sleep(0)

    async def _turn(self) -> bool:
        """Run the next step; an error of it was told to the leader, and ends this process."""
        try:
            return self.follower.turn()
        except Exception as error:
            await self._give_way(error)
            raise

    def _spin(self) -> int:
        """How long to poll for the next step before sleeping, in nanoseconds."""
        return spin_budget(self._cores, len(self.ctx.lines), self._gap_ns)
