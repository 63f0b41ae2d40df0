"""An actor: one asyncio process with a lifecycle, told when its peers come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from actors.context import Context

__all__ = ["Actor", "PeerEvent", "PeerLost", "PeerReady"]


class PeerLost(NamedTuple):
    """An actor this one shares something with is dead, or dies with its cell.

    What was shared is poisoned: writing raises Poisoned, which may happen before this event arrives; what the
    peer had finished writing can still be drained until the matching `PeerReady`. A peer that dies again
    while it starts is lost again, without a `PeerReady` in between. `reason` is a sentence about the cell's
    death.
    """

    actor: str
    cell: str
    reason: str


class PeerReady(NamedTuple):
    """An actor this one shares something with has finished its setup; before that nobody reads what it is
    sent.

    Replaced objects already stand in the context under their names; references to the old ones are dead.
    `generation` is 1 at the start and grows with every restart of the peer's cell.
    """

    actor: str
    cell: str
    generation: int


PeerEvent = PeerLost | PeerReady


class Actor:
    """Base of every actor: `setup`, then `run`, then `teardown`, all in one event loop.

    An exception in any of them ends the process, and with it the cell; its traceback reaches the supervisor.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    async def setup(self) -> None:
        """Become ready. May take minutes, and says how far it is by `ctx.stage`; a stop order cancels it."""

    async def run(self) -> None:
        """Work until `ctx.stopping`. To return before that counts as a death."""
        await self.ctx.until_stopping()

    async def teardown(self) -> None:
        """Let go of what outlives the process. Called after `run`, not after a failure."""

    def on_peer(self, event: PeerEvent) -> None:
        """A peer came or went; called between `setup` and the end of `run`, never while another callback
        runs.
        """
