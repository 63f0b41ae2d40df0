"""The pace of looking at actors, on a clock and a board of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.pace import BUSY, IDLE, Pace
from shm.board import Board, Line


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    board = Board.create(2)
    found = [board.line(0), board.line(1)]
    for line in found:
        line.epoch = 1
    yield found
    board.close()


def test_a_house_that_has_slept_for_a_second_is_looked_at_less_often(lines: list[Line]) -> None:
    pace = Pace(lines)
    assert [pace.interval(now, settled=True) for now in (5.0, 5.9, 6.0, 60.0)] == [BUSY, BUSY, IDLE, IDLE]


@pytest.mark.parametrize(("word", "value"), [("epoch", 3), ("epoch", 2), ("step", 1)])
def test_whatever_moves_brings_the_quick_pace_back(lines: list[Line], word: str, value: int) -> None:
    pace = Pace(lines)
    pace.interval(5.0, settled=True)
    assert pace.interval(7.0, settled=True) == IDLE
    setattr(lines[1], word, value)
    assert pace.interval(7.1, settled=True) == BUSY


def test_an_actor_that_is_awake_is_busy_however_long(lines: list[Line]) -> None:
    lines[0].epoch = 2
    pace = Pace(lines)
    assert {pace.interval(now, settled=True) for now in (5.0, 60.0)} == {BUSY}


def test_a_cell_that_changes_is_watched_closely(lines: list[Line]) -> None:
    pace = Pace(lines)
    assert {pace.interval(now, settled=False) for now in (5.0, 60.0)} == {BUSY}
