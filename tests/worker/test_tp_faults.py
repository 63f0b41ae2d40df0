"""What goes wrong on one rank of a cell ends the cell at once and says where; an abort leaves it clean."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.messages.step import COUNTER, END, SAMPLES, SLOT, START, STRIDE, TOTAL
from mstar.messages.tokens import LENGTH
from tests.helpers.tiny_model import write_tiny_model
from tests.worker.local_rank import Prompt
from tests.worker.planted import clock_ahead, corrupted, out_of_memory
from tests.worker.test_tp_parity import alike
from tests.worker.tp_cell import POINTS, Abort, Cell, CellFailed, Job

pytestmark = pytest.mark.timeout(60)

SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_bytes": 1 << 20, "max_batch_tokens": 16}
CHUNKS = 7
LONG = Prompt(tuple(np.random.default_rng(1).integers(3, 250, 16 * CHUNKS - 9).tolist()), 5)
SHORT = Prompt(tuple(range(5, 12)), 14)
SECOND_CHUNK, DECODE = 2, CHUNKS + 1


def broken(directory: Path, plant: Callable[..., Any] | None, **settings: object) -> dict[int, str]:
    """What each of two ranks raises while a prompt runs in chunks and decodes."""
    with Cell(2) as cell:
        cell.build(directory, plant=plant, **{**SETTINGS, **settings})
        with pytest.raises(CellFailed) as failed:
            cell.run(Job([LONG]))
    return failed.value.errors


@pytest.mark.behaviour("F-05", "S0-08", "S0-15", "S0-29", "B-09")
@pytest.mark.parametrize(
    ("seq", "column", "fault"),
    [
        (SECOND_CHUNK, SLOT, "request is 1 in the plan, -1 on this rank"),
        (SECOND_CHUNK, COUNTER, "counter is 17 in the plan, 16 on this rank"),
        (SECOND_CHUNK, SAMPLES, "samples is 1 in the plan, 0 on this rank"),
        (SECOND_CHUNK, START, "chunk_strides is 16 in the plan, 15 on this rank"),
        (SECOND_CHUNK, END, "chunk_strides is 16 in the plan, 17 on this rank"),
        (SECOND_CHUNK, TOTAL, "chunk_totals is 104 in the plan, 103 on this rank"),
        (SECOND_CHUNK, STRIDE, "chunk_strides is 17 in the plan, 16 on this rank"),
        (DECODE, COUNTER, "counter is 2 in the plan, 1 on this rank"),
    ],
)
def test_a_step_that_differs_on_one_rank_names_step_row_field_and_both_values(
    tiny_model_dir: Path, seq: int, column: int, fault: str
) -> None:
    errors = broken(tiny_model_dir, partial(corrupted, seq, column, True))
    assert errors[1] == f"PlanMismatch: step {seq}, row 0: {fault}"
    assert re.match("(CollectiveFailed|FollowerFailed)", errors[0])


@pytest.mark.behaviour("F-05")
@pytest.mark.parametrize("depth", [0, 2])
def test_a_step_that_was_damaged_on_its_way_fails_by_its_digest(tiny_model_dir: Path, depth: int) -> None:
    errors = broken(tiny_model_dir, partial(corrupted, DECODE, COUNTER, False), pipeline_depth=depth)
    assert re.match(f"DigestMismatch: step {DECODE}: .* digest 0x", errors[1])


@pytest.mark.behaviour("F-32", "B-09")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_forward_without_memory_on_one_rank_ends_the_cell(tiny_model_dir: Path, victim: int) -> None:
    errors = broken(tiny_model_dir, partial(out_of_memory, DECODE, victim))
    assert errors[victim] == "StepFailed: the step failed: OutOfMemoryError: planted"
    assert re.match("(CollectiveFailed|FollowerFailed)", errors[1 - victim])


@pytest.mark.behaviour("F-08")
def test_a_killed_rank_fails_the_collective_of_the_others(tmp_path: Path) -> None:
    with Cell(3) as cell:
        directory = write_tiny_model(tmp_path / "three", heads=3, kv_heads=3, head_dim=16, ffn=96)
        cell.build(directory, **SETTINGS)
        os.kill(cell.processes[2].pid or 0, signal.SIGKILL)
        with pytest.raises(CellFailed) as failed:
            cell.run(Job([SHORT]))
    assert failed.value.errors[2] == "gone"
    assert all("rank 2 has ended" in failed.value.errors[rank] for rank in (0, 1))


@pytest.mark.behaviour("S0-35")
@pytest.mark.parametrize("other", [{"pipeline_depth": 2}, {"max_batch_tokens": 32}, {"prefix_cache": False}])
def test_a_rank_with_another_configuration_refuses_to_start(
    tiny_model_dir: Path, other: dict[str, Any]
) -> None:
    with Cell(2) as cell, pytest.raises(CellFailed) as failed:
        cell.build_each(tiny_model_dir, [SETTINGS, {**SETTINGS, **other}])
    pattern = (
        r"ConfigMismatch: the configuration of rank 1 is \w{32}, that of its leader, rank 0, is \w{32}; "
    )
    assert all(re.match(pattern, failed.value.errors[rank]) for rank in (0, 1))


@pytest.mark.behaviour("F-04")
def test_clocks_that_differ_by_seconds_change_no_step(tiny_model_dir: Path) -> None:
    settings = {**SETTINGS, "max_batch_tokens": 64, "target_itl_ms": 3.0}
    asked = Job([SHORT, LONG, SHORT, LONG], stagger=2)
    with Cell(2) as cell:
        cell.build(tiny_model_dir, plant=partial(clock_ahead, 9.0), **settings)
        skewed = cell.run(asked)
    alike(skewed)  # what the leader measures sizes its steps; what another rank measures changes nothing
    with Cell(2) as cell:
        cell.build(tiny_model_dir, **SETTINGS)
        plain = cell.run(asked)
    assert [answer.tokens for answer in skewed.answers] == [answer.tokens for answer in plain.answers]


# ---- aborts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cells() -> Iterator[dict[int, Cell]]:
    with Cell(2) as two, Cell(4) as four:
        yield {2: two, 4: four}


@pytest.mark.behaviour("F-06", "S0-13", "S0-27", "B-08")
@pytest.mark.parametrize(("world", "depth"), [(2, 0), (2, 1), (2, 2), (4, 1)])
def test_an_abort_at_every_chunk_and_point_of_the_pipeline_leaves_every_rank_clean(
    cells: dict[int, Cell], tiny_model_dir: Path, world: int, depth: int
) -> None:
    cell = cells[world]
    cell.build(tiny_model_dir, pipeline_depth=depth, **SETTINGS)
    whole = cell.run(Job([SHORT, LONG]))
    alike(whole)
    steps = len(whole.books[0].log)
    for turn in range(CHUNKS + 4):
        for point in POINTS if world == 2 else POINTS[1:2]:
            ran = cell.run(Job([SHORT, LONG], aborts=[Abort(1, turn, point)]))
            alike(ran)
            assert ran.ledger["slots"] == SETTINGS["max_num_seqs"]
            short, long = ran.answers
            assert (short.tokens, short.finish) == (whole.answers[0].tokens, [LENGTH])
            assert long.tokens == whole.answers[1].tokens[: len(long.tokens)]
            assert len(ran.books[0].log) <= steps + 1
    assert cell.run(Job([SHORT, LONG])).answers == whole.answers
