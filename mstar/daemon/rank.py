"""A rank as a process of this daemon: its log lines have the daemon's form and its own name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstar.daemon.log import configure
from mstar.worker.following import FollowerActor
from mstar.worker.rank import RankActor

if TYPE_CHECKING:
    from actors.context import Context

__all__ = ["Follower", "Rank"]


class Rank(RankActor):
    """See RankActor."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        deployment = self.config.deployment
        configure(deployment.log_level, deployment.log_format, actor=ctx.name)


class Follower(FollowerActor):
    """See FollowerActor."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        deployment = self.config.deployment
        configure(deployment.log_level, deployment.log_format, actor=ctx.name)
