"""Aligned columns and progress."""

from __future__ import annotations

import io

import pytest

from mstar.cli.table import ProgressLine, print_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_columns_are_aligned_and_lines_have_no_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([("a", "b"), ("long", 1)], indent=" ")
    assert capsys.readouterr().out == " a     b\n long  1\n"


def test_a_terminal_sees_one_line_with_a_bar() -> None:
    stream = Terminal()
    line = ProgressLine(stream)
    line("downloading", 46_000_000, 92_000_000)
    assert stream.getvalue() == "\r\x1b[Kdownloading [############............]  50 % of 92 MB"
    line.clear()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_elsewhere_each_stage_is_a_line_once() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream)
    for done in range(3):
        line("downloading", done, 2)
    line("converting", 0, 0)
    line.clear()
    assert stream.getvalue() == "downloading\nconverting\n"
