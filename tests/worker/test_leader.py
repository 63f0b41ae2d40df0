"""A leader and its followers' pace: what it waits for, and when it may go on."""

from __future__ import annotations

import pytest

from mstar.worker.leader import FollowerFailed, Leader
from tests.worker.null_rank import LIMITS, NullRank, expected

RING = 4


class Paced(NullRank):
    """A rank that leads one follower, which has come as far as ``done`` says."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.done = 0
        self.posted: str | None = None
        self.steps.done = lambda reader: self.done  # type: ignore[method-assign]
        self.steps.error = lambda reader: self.posted  # type: ignore[method-assign]
        self.leader = Leader(self.scheduler, self.executor, self.steps, 1, RING)

    def run_dry(self) -> int:
        """Turn until nothing is planned any more; the steps planned so far."""
        while self.turn():
            pass
        return self.scheduler.pipeline.planned


def test_a_leader_runs_ahead_of_a_follower_by_the_steps_of_the_ring_and_no_further() -> None:
    rank = Paced()
    rank.admit(1, max_tokens=20)
    for done in (0, 1, 3):
        rank.done = done
        assert rank.run_dry() == done + RING
        assert rank.leader.behind


def test_a_leader_that_waits_sees_a_follower_move() -> None:
    """Without that it would sleep on until something else woke it."""
    rank = Paced()
    rank.admit(1, max_tokens=20)
    rank.run_dry()
    assert not rank.leader.moved
    rank.done = 1
    assert rank.leader.moved
    rank.run_dry()
    assert not rank.leader.moved


def test_an_input_is_given_back_when_every_rank_has_run_its_bind() -> None:
    rank = Paced()
    rank.admit(1, max_tokens=3)
    rank.run_dry()
    assert rank.kept[1].tokens == expected(1, 5, 3)
    assert rank.released == []
    rank.done = 1
    assert rank.leader.moved
    rank.run_dry()
    assert rank.released == [1]


def test_an_error_that_a_follower_posted_ends_the_leader_with_its_words() -> None:
    rank = Paced()
    rank.admit(1, max_tokens=20)
    rank.turn()
    rank.posted = "step 1: PlanMismatch"
    with pytest.raises(FollowerFailed, match=r"follower 1 .*step 1: PlanMismatch"):
        rank.run_dry()
