"""Log lines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from mstar.daemon.log import configure, log


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_names_time_level_actor_and_fields() -> None:
    stream = io.StringIO()
    configure("info", "text", stream=stream)
    log(logging.INFO, "loading weights", actor="rank/0", seconds=1.23456, path="a b")
    log(logging.DEBUG, "unseen")
    stamp, rest = stream.getvalue().split(" ", 1)
    assert rest == 'INFO rank/0 loading weights seconds=1.23 path="a b"\n'
    assert len(stamp) == len("2026-01-31T12:00:00.000Z")


def test_json_has_the_same_and_a_traceback_in_one_line() -> None:
    stream = io.StringIO()
    configure("info", "json", actor="gateway/0", stream=stream)
    log(logging.WARNING, "hot", actor="rank/0", degrees=3)
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("any").exception("broke")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["actor"], first["message"], first["degrees"]) == (
        "warning",
        "rank/0",
        "hot",
        3,
    )
    assert (second["actor"], second["message"]) == ("gateway/0", "broke")
    assert second["traceback"].endswith("ValueError: x")
