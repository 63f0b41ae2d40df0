"""`mstar status`: the figures as they are printed."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from mstar.cli import status

COUNTS = ["evicted", "page_refusals", "preempted", "refused"]
FIGURES = {
    "running": 1,
    "pages_total": 40,
    "pages_free": 10,
    "pages_cached": 25,
    "evicted": 7,
    "page_refusals": 9,
    "preempted": 2,
    "refused": 3,
    "cached_tokens": 320,
    "step_seconds": 1.5,
}


class FakeClient:
    """Answers with one rank's figures."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {"daemon": {"model": "tiny", "state": "ready"}, "ranks": {"rank/0": FIGURES}}


def test_the_pages_of_a_rank_add_up_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "Client", FakeClient)
    monkeypatch.setattr(status, "target_of", lambda options: None)
    assert status.run(argparse.Namespace(json=False, api_key=None)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    head = next(line for line in lines if line[:1] == ["pages"])
    assert head == ["pages", "total", "free", "cached", "held", *COUNTS]
    assert lines[lines.index(head) + 1] == ["rank/0", "40", "10", "25", "5", "7", "9", "2", "3"]
    assert ["cached", "tokens", "320"] in lines
    assert not any(line[:2] == ["pages", "free"] for line in lines)
