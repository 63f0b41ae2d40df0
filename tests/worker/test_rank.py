"""Whom the leader's process blames when it ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mstar.distributed.errors import CollectiveFailed
from mstar.engine.slot_table import PlanMismatch
from mstar.worker.leader import FollowerFailed
from mstar.worker.rank import RankActor

BROKEN = CollectiveFailed("collective 7 of rank 0 failed: rank 2 has ended")


def leading(*posted: str | None) -> RankActor:
    """As much of a leader as blames: its step ring, where followers posted these errors."""
    ring = SimpleNamespace(layout=SimpleNamespace(readers=len(posted)))
    rank = RankActor.__new__(RankActor)
    rank._steps = SimpleNamespace(ring=ring, error=posted.__getitem__)  # type: ignore[assignment]
    return rank


@pytest.mark.behaviour("B-09")
def test_who_broke_a_collective_is_told_not_who_met_it_broken() -> None:
    met = "step 3: CollectiveFailed: collective 7 of rank 1 failed: rank 2 has ended"
    caused = "step 3: PlanMismatch: step 3, row 0: counter is 9 in the plan, 8 on this rank"
    with pytest.raises(FollowerFailed, match="follower 2 of the cell failed: step 3: PlanMismatch"):
        leading(met, caused)._blame(BROKEN)


def test_a_collective_that_nobody_explains_is_the_error_itself() -> None:
    leading(None, None)._blame(BROKEN)


def test_an_error_of_the_leader_itself_blames_no_follower() -> None:
    leading("step 3: PlanMismatch")._blame(PlanMismatch(3, 0, "counter", 9, 8))
