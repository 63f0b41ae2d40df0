"""CellMember: what leader and followers of a cell have in common: an engine, inputs, and how they fail."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.actor import Actor
from mstar.config.schema import RankConfig
from mstar.distributed.errors import CollectiveFailed
from mstar.messages.step import Bind
from mstar.worker.entry import REPLAYS_SLAB

if TYPE_CHECKING:
    from actors.context import Context
    from mstar.worker.engine import Engine

__all__ = ["CellMember"]

FIRST_WORD = 0.5
"""Seconds that a rank whose collective broke leaves to the rank that broke it: the cause is told there."""


class CellMember(Actor):
    """One rank of a cell. A cell is named after the rank that leads it, its lowest."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.config = msgspec.msgpack.decode(ctx.config, type=RankConfig)
        self._prompts_slab = "prompts/0"
        self._replays_slab = "replays/0"

    async def setup(self) -> None:
        from mstar.worker.engine import build_engine

        ctx = self.ctx
        self.engine: Engine = await asyncio.to_thread(
            build_engine, self.config, self._input, ctx.stage, generation=ctx.generation
        )

    def _input(self, bind: Bind) -> NDArray[np.int32]:
        """The tokens a bind names, int32 [length], read where they lie."""
        source = bind.inputs[0]
        slab = self.ctx.slabs[self._replays_slab if source.slab == REPLAYS_SLAB else self._prompts_slab]
        return np.frombuffer(slab.view(source.handle), np.int32, bind.length)

    async def _give_way(self, error: Exception) -> None:
        """After a broken collective, leave the peer that broke it the time to tell why."""
        if isinstance(error, CollectiveFailed):
            await asyncio.sleep(FIRST_WORD)
