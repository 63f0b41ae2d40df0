"""What a step costs the host is bounded by its structure: no work by row in a step that only decodes.

Counted are the bytecodes that a step executes in the rank's own classes, over a null forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import pytest

from tools.bench.host_step import Load, NullRank

MOST_PLAIN = 2400
"""Bytecodes of a plain decode step at most; Python 3.11 executes 2,150 to 2,280 of them."""


class Cost(NamedTuple):
    """Bytecodes of one step, its rows and what it carries beside them."""

    operations: int
    rows: int
    grants: int
    drops: int
    binds: int
    chunked: bool

    @property
    def plain(self) -> bool:
        """Whether the step only decodes."""
        return not (self.grants or self.drops or self.binds or self.chunked)


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the bytecodes executed inside, in whatever is called from here."""
    operations = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal operations
        frame.f_trace_opcodes = True
        if event == "opcode":
            operations += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: operations
    finally:
        sys.settrace(before)


def costs(rows: int, steps: int, *, chunks: bool = False, depth: int = 1) -> list[Cost]:
    """The cost of ``steps`` steps, once ``rows`` rows have run side by side for a few."""
    rank = NullRank(Load(rows, depth, not chunks, chunks))
    running = 0
    while running < 4:
        plan = rank.step(rank.requests(), _nothing)
        rank.settle()
        running += plan is not None and plan.slot.size == rows + 2 * chunks
    found = []
    for _ in range(steps):
        records = rank.requests()
        with counted() as operations:
            plan = rank.step(records, _nothing)
            total = operations()
        rank.settle()
        assert plan is not None
        chunked = plan.chunk_starts.size > 0
        found.append(
            Cost(total, plan.slot.size, plan.grant_slot.size, plan.drops.size, len(plan.binds), chunked)
        )
    rank.close()
    return found


def _nothing() -> None:
    """Between the duties of a step."""


def test_a_plain_step_costs_the_same_whatever_its_rows() -> None:
    few, many = (
        [cost.operations for cost in costs(rows, 32) if cost.plain and cost.rows == rows] for rows in (8, 200)
    )
    assert min(few) == min(many)
    assert max(many) <= MOST_PLAIN


def test_a_step_in_which_every_row_gets_a_page_costs_the_same_whatever_its_rows() -> None:
    few, many = (
        [cost.operations for cost in costs(rows, 32) if cost.grants == rows and not cost.chunked]
        for rows in (8, 200)
    )
    assert min(few) == min(many)
    assert max(many) <= MOST_PLAIN * 3 // 2


def test_most_steps_give_no_pages() -> None:
    steps = costs(32, 64)
    assert sum(cost.plain for cost in steps) >= len(steps) * 3 // 4


def test_two_prefilling_rows_cost_the_same_beside_many_decodes_as_beside_few() -> None:
    few, many = (
        [
            cost.operations
            for cost in costs(rows, 24, chunks=True)
            if cost.rows == rows + 2 and not cost.binds and not cost.drops
        ]
        for rows in (8, 200)
    )
    assert min(few) == min(many)
    assert max(many) <= MOST_PLAIN * 2


@pytest.mark.parametrize("depth", [0, 2])
def test_depth_adds_nothing_to_a_step(depth: int) -> None:
    at_depth, at_one = (
        min(cost.operations for cost in costs(16, 16, depth=each) if cost.plain) for each in (depth, 1)
    )
    assert abs(at_depth - at_one) < 20
