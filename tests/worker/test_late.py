"""Rows that need their last token on the host before they sample: they draw late, and only they."""

from __future__ import annotations

import numpy as np
import pytest

from mstar.messages.step import LATE_LAST, LATE_RUN, StepPlan
from mstar.messages.tokens import LENGTH, STOP
from tests.worker.null_rank import LIMITS, NullRank, expected

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
MASKED = LIMITS._replace(mask_bytes=32)


class Chain:
    """Each token may only be followed by one other: a mask that is a step old lets the wrong one through."""

    def __init__(self, first: int = 3) -> None:
        self.next = first

    def allowed(self) -> bytes:
        bits = np.zeros(256, np.uint8)
        bits[self.next] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token: int) -> None:
        assert token == self.next
        self.next = (5 * token + 11) % 251


def chain(count: int, first: int = 3) -> list[int]:
    found, rule = [], Chain(first)
    for _ in range(count):
        found.append(rule.next)
        rule.accept(rule.next)
    return found


@pytest.mark.behaviour("F-37")
@DEPTHS
def test_rows_with_a_grammar_and_free_rows_each_get_their_tokens(depth: int) -> None:
    rank = NullRank(MASKED._replace(depth=depth))
    rows: list[tuple[int, int]] = []
    rank.on_launch = lambda plan: rows.extend(
        zip(plan.request.tolist(), plan.late_sample.tolist(), strict=True)
    )
    for request in range(1, 7):
        if request % 2:
            rank.constraints[request] = Chain(request)
        rank.admit(request, prompt=5 * request, max_tokens=7)
    rank.drain()
    for request in range(1, 7):
        owed = chain(7, request) if request % 2 else expected(request, 5 * request, 7)
        assert rank.kept[request].tokens == owed
        assert rank.kept[request].finish == [LENGTH]
    assert {request for request, late in rows if late} == {1, 3, 5}
    rank.check_idle()


@pytest.mark.behaviour("F-37")
@DEPTHS
def test_a_row_that_draws_late_rides_in_every_step_all_the_same(depth: int) -> None:
    """Its forward is planned ahead like any other: what it draws is known long before its step lands."""
    rank = NullRank(MASKED._replace(depth=depth))
    steps: list[int] = []
    rank.on_launch = lambda plan: steps.append(plan.seq) if 1 in plan.request else None
    rank.constraints[1] = Chain()
    rank.admit(1, prompt=9, max_tokens=12)
    rank.admit(2, prompt=9, max_tokens=30)
    rank.drain()
    assert steps == list(range(1, 1 + 1 + 12))
    assert rank.scheduler.statistics().stale_results == 0


@DEPTHS
def test_the_last_token_is_drawn_and_does_not_run(depth: int) -> None:
    rank = NullRank(MASKED._replace(depth=depth))
    late: list[int] = []
    rank.on_launch = lambda plan: late.extend(plan.late_sample.tolist())
    rank.constraints[1] = Chain()
    rank.admit(1, prompt=4, max_tokens=3)
    rank.drain()
    assert late == [LATE_RUN, LATE_RUN, LATE_RUN, LATE_LAST]


@DEPTHS
def test_a_stop_id_ends_a_row_that_draws_late_without_a_stale_step(depth: int) -> None:
    rank = NullRank(MASKED._replace(depth=depth))
    rank.constraints[1] = Chain()
    rank.admit(1, prompt=4, max_tokens=50, stop_ids=(chain(6)[-1],))
    rank.drain()
    assert rank.kept[1].tokens == chain(6)
    assert rank.kept[1].finish == [STOP]
    assert rank.scheduler.statistics().stale_results == 0
    rank.check_idle()


@DEPTHS
@pytest.mark.parametrize("turns", range(8))
def test_an_abort_of_a_row_that_draws_late_frees_everything(depth: int, turns: int) -> None:
    rank = NullRank(MASKED._replace(depth=depth))
    rank.constraints[1] = Chain()
    rank.admit(1, prompt=40, max_tokens=9)
    rank.admit(2, prompt=6, max_tokens=9)
    for _ in range(turns):
        rank.turn()
    rank.scheduler.abort(1)
    rank.admit(3, prompt=6, max_tokens=9)
    rank.drain()
    assert rank.kept[2].tokens == expected(2, 6, 9)
    assert rank.kept[3].tokens == expected(3, 6, 9)
    rank.check_idle()


@DEPTHS
def test_rows_that_draw_late_are_preempted_and_go_on_where_they_were(depth: int) -> None:
    rank = NullRank(MASKED._replace(depth=depth, pages=24, slots=6, horizon_tokens=4))
    for request in range(1, 13):
        rank.constraints[request] = Chain(request)
        rank.admit(request, prompt=8, max_tokens=60)
    rank.drain()
    assert rank.scheduler.statistics().preempted > 0
    for request in range(1, 13):
        assert rank.kept[request].tokens == chain(60, request)
    rank.check_idle()


def test_more_rows_than_a_record_has_room_for_masks_take_turns() -> None:
    rank = NullRank(MASKED._replace(tail_bytes=1024))
    most = rank.limits.masks
    assert most < 12
    masks: list[int] = []
    rank.on_launch = lambda plan: masks.append(len(plan.masks))
    for request in range(1, 9):
        rank.constraints[request] = Chain(request)
    for request in range(1, 9):
        rank.admit(request, prompt=4, max_tokens=20)
    rank.drain()
    assert max(masks) <= most
    for request in range(1, 9):
        assert rank.kept[request].tokens == chain(20, request)


def test_choices_are_held_to_their_own_grammar() -> None:
    rank = NullRank(MASKED)
    for request in (1, 2, 3):
        rank.constraints[request] = Chain(request)
    rank.admit(1, prompt=30, max_tokens=5, count=3)
    rank.drain()
    assert [rank.kept[request].tokens for request in (1, 2, 3)] == [chain(5, first) for first in (1, 2, 3)]


def test_a_plan_with_a_late_row_that_is_not_late_here_is_refused() -> None:
    rank = NullRank(MASKED)
    rank.admit(1, prompt=4, max_tokens=9)

    def corrupt(plan: StepPlan) -> None:
        if plan.seq == 2:
            plan.late_sample[0] = LATE_RUN

    rank.on_launch = corrupt
    rank.turn()
    with pytest.raises(Exception, match="late_sample"):
        rank.turn()


@pytest.mark.behaviour("F-32", "F-37")
@DEPTHS
@pytest.mark.parametrize("failing", range(1, 14))
def test_a_step_that_fails_under_a_late_row_ends_that_row_and_nothing_else(depth: int, failing: int) -> None:
    rank = NullRank(MASKED._replace(depth=depth))
    rank.constraints[1] = Chain()
    rank.admit(1, prompt=9, max_tokens=10)
    rank.fail_at.add(failing)
    rank.drain()
    kept = rank.kept[1]
    assert kept.tokens == chain(10)[: len(kept.tokens)]
    assert len(kept.finish) + len(kept.failed) == 1
    rank.constraints[2] = Chain(5)
    rank.admit(2, prompt=9, max_tokens=10)
    rank.fail_at.clear()
    rank.drain()
    assert rank.kept[2].tokens == chain(10, 5)
    rank.check_idle()


def test_a_constraint_without_room_for_masks_is_refused() -> None:
    rank = NullRank(LIMITS)
    rank.constraints[1] = Chain()
    rank.admit(1)
    rank.admit(2)
    rank.drain()
    assert rank.kept[1].failed[0].status == 400
    assert rank.kept[2].tokens == expected(2, 5, 4)
    assert sorted(rank.released) == [1, 2]
