"""The list of behaviours and the tests agree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import behaviours
from tests.helpers.behaviours import Behaviour
from tests.rules.sources import calls, python_files


def named() -> Iterator[tuple[str, str]]:
    """(file, id) for every literal in a behaviour mark."""
    for file in python_files("tests"):
        for name, node in calls(file):
            if name.endswith("mark.behaviour"):
                yield from ((file, ast.literal_eval(argument)) for argument in node.args)


def test_every_id_that_a_test_names_is_listed() -> None:
    rows = behaviours.read()
    assert [f"{file} names {id}" for file, id in named() if id not in rows] == []


def test_every_row_that_is_due_is_named_by_a_test() -> None:
    by_tests = {id for _, id in named()}
    assert [row.id for row in behaviours.read().values() if row.due and row.id not in by_tests] == []


def test_the_summary_counts_and_names_what_is_missing() -> None:
    rows = {
        "F-01": Behaviour("F-01", True, "one"),
        "F-02": Behaviour("F-02", True, "two"),
        "F-04": Behaviour("F-04", False, "four"),
    }
    assert behaviours.summary(rows, {"F-01", "F-04"}) == [
        "behaviours: 1 of 2 due rows are named by a test",
        "  F-02 is named by no test: two",
        "  named before they are due: F-04",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [("- `F-1` due: short id", "not a line"), ("- `F-01` due: again", "listed twice")],
)
def test_a_broken_list_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "behaviours.md"
    path.write_text(f"- `F-01` due: first\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        behaviours.read(path)
