"""Random schedules: no invariant breaks, whatever leaves, dies, lacks memory or comes late."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from random import Random

import msgspec
import pytest

from mstar.simulation.schedule import Schedule, draw, from_text, play, to_text
from mstar.simulation.soak import Range, soak

EACH = 100


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _soak(first: int, count: int, drawn: object = draw) -> Range:
    told: list[str] = []
    state = soak(Range(first, first + count, first), drawn=drawn, tell=told.append, most_failures=1)  # type: ignore[arg-type]
    assert not state.failed, "\n".join(told)
    assert state.next == first + count
    return state


@pytest.mark.parametrize("first", range(0, 24 * EACH, EACH))
@pytest.mark.behaviour(
    "S0-01", "S0-10", "S0-11", "S0-12", "S0-13", "S0-14", "S0-17", "S0-18", "S0-20", "S0-21", "S0-24", "S0-25"
)
@pytest.mark.behaviour("S0-27", "S0-30", "S0-33", "S0-36", "S0-37", "S0-38", "S0-39", "S0-95", "S0-96")
@pytest.mark.behaviour("B-01", "B-07", "B-08", "B-09", "F-04", "F-05", "F-06", "F-20", "F-35", "F-36")
def test_random_schedules_break_nothing(first: int) -> None:
    state = _soak(first, EACH)
    assert state.steps > 10 * EACH


def _two_groups(seed: int) -> Schedule:
    """Two nodes over the same two ranks, each with collectives of its own; the second is not chunked."""
    schedule = draw(seed)
    random = Random(seed)
    nodes = (schedule.nodes + schedule.nodes)[:2]
    whole = {**nodes[1], "chunked": 0}
    replace = msgspec.structs.replace
    wishes = [replace(wish, node=random.randrange(2), late=False) for wish in schedule.wishes]
    most = min(node["max_seq_len"] for node in nodes)
    fits = tuple(wish for wish in wishes if wish.prompt + wish.max_tokens <= most)
    return replace(schedule, ranks=2, nodes=(nodes[0], whole), groups=((0, 1), (0, 1)), wishes=fits)


@pytest.mark.parametrize("first", range(0, 500, EACH))
@pytest.mark.behaviour("S0-02")
def test_two_groups_over_the_same_two_ranks_never_deadlock(first: int) -> None:
    state = _soak(first, EACH, _two_groups)
    assert state.steps > 5 * EACH


def test_a_schedule_is_text_and_plays_the_same_again() -> None:
    for seed in range(20):
        schedule = draw(seed)
        assert from_text(to_text(schedule)) == schedule
        first, second = play(schedule), play(schedule)
        assert first.events == second.events
        assert first.steps == second.steps
