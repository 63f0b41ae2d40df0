"""Lines."""

from __future__ import annotations

import os

import pytest

from shm.board import Board
from shm.errors import LayoutMismatch


def test_what_an_actor_writes_to_its_line_others_read() -> None:
    ours = Board.create(3)
    theirs = Board.attach(os.dup(ours.segment.fd))
    line, seen = ours.line(1), theirs.line(1)
    line.epoch, line.beat, line.stage, line.step, line.pid = 5, 6, 7, 8, 9
    line.stage_name = "capturing"
    assert (seen.epoch, seen.beat, seen.stage, seen.step, seen.pid) == (5, 6, 7, 8, 9)
    assert seen.statistics() == (True, 6, 7, "capturing", 8, 9)
    assert theirs.n == 3
    ours.close()
    theirs.close()


def test_lines_do_not_touch_each_other() -> None:
    board = Board.create(2)
    board.line(0).stage_name = "x" * 100
    board.line(0).pid = 2**64 - 1
    assert board.line(1).statistics() == (False, 0, 0, "", 0, 0)
    board.close()


def test_a_stage_name_is_cut_between_characters_and_leaves_no_rest_of_the_old_one() -> None:
    board = Board.create(1)
    line = board.line(0)
    line.stage_name = "a" + "é" * 17
    assert line.stage_name == "a" + "é" * 15
    line.stage_name = "run"
    assert line.stage_name == "run"
    board.close()


def test_a_line_that_does_not_exist_is_named() -> None:
    board = Board.create(2)
    with pytest.raises(IndexError, match="0 to 1"):
        board.line(2)
    board.close()
    with pytest.raises(ValueError, match="at least one"):
        Board.create(0)


def test_an_overwritten_line_count_is_refused() -> None:
    board = Board.create(2)
    board.segment.words[0] = 1 << 40
    with pytest.raises(LayoutMismatch, match="lines"):
        Board.attach(os.dup(board.segment.fd))
    board.close()
