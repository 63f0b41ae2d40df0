"""The list of behaviours in docs/behaviours.md, and which of them the collected tests name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

LIST = Path(__file__).parents[2] / "docs" / "behaviours.md"
LINE = re.compile(r"^- `(?P<id>(?:S0|S3|S4|B|F)-\d{2,3})` (?P<when>due|later): (?P<text>\S.*)$")


class Behaviour(NamedTuple):
    """One row: its id, whether it is due by now, and what the finished system shows."""

    id: str
    due: bool
    text: str


def read(path: Path = LIST) -> dict[str, Behaviour]:
    """All rows by id, in the order of the file. Raises ValueError for a broken line or an id used twice."""
    rows: dict[str, Behaviour] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("- `"):
            continue
        match = LINE.match(line)
        if match is None:
            raise ValueError(f"{path.name}:{number}: not a line of the form '- `F-01` due: text': {line!r}")
        if match["id"] in rows:
            raise ValueError(f"{path.name}:{number}: {match['id']} is listed twice")
        rows[match["id"]] = Behaviour(match["id"], match["when"] == "due", match["text"])
    return rows


def named_by(items: Iterable[pytest.Item]) -> set[str]:
    """The ids that the `behaviour` marks of these tests name."""
    return {str(name) for item in items for mark in item.iter_markers("behaviour") for name in mark.args}


def summary(rows: dict[str, Behaviour], named: set[str]) -> list[str]:
    """What to print at the end of a whole run: a count, and every due row that no test names."""
    due = [row for row in rows.values() if row.due]
    missing = [row for row in due if row.id not in named]
    lines = [f"behaviours: {len(due) - len(missing)} of {len(due)} due rows are named by a test"]
    lines += [f"  {row.id} is named by no test: {row.text}" for row in missing]
    early = sorted(row.id for row in rows.values() if not row.due and row.id in named)
    if early:
        lines.append(f"  named before they are due: {', '.join(early)}")
    return lines
