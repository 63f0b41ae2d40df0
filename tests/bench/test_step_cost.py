"""The step-cost bench: which steps it measures, how, and what it makes of the times."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from mstar.model.files import ModelFiles
from mstar.simulation.calibrate import misfit
from tests.helpers.tiny_model import write_tiny_model
from tools.bench.step_cost import Calibration, Row, StepTimer, calibrated, grid, table, work_of


@pytest.fixture
def timer(tmp_path: Path) -> StepTimer:
    ticks = itertools.count(0, 1000)
    files = ModelFiles("tiny", write_tiny_model(tmp_path))
    return StepTimer(files, dtype="float32", threads=1, tokens=1024, clock=lambda: next(ticks))


def test_a_step_of_any_shape_runs_and_is_timed_once(timer: StepTimer) -> None:
    for shape in ((Row(1, 5),), (Row(1, 60), Row(1, 3)), (Row(1, 20), Row(30, 50)), (Row(40, 40),)):
        assert timer.ns(shape) == 1000


def test_a_shape_beyond_the_cache_is_refused(timer: StepTimer) -> None:
    with pytest.raises(ValueError, match="more than the 64 pages"):
        timer.ns((Row(1, 500), Row(1, 500), Row(1, 500)))


def test_what_a_cost_sees_of_a_shape() -> None:
    assert work_of((Row(1, 100), Row(1, 50), Row(20, 80))) == (22, 3, 100 + 50 + 1600)


def test_the_grid_holds_decodes_chunks_and_both_and_stays_within_the_longest() -> None:
    shapes = grid(400, rows=(1, 4))
    assert len(shapes) == len({*shapes})
    assert {len(shape) for shape in shapes} == {1, 4, 9}
    assert max(row.length for shape in shapes for row in shape) == 400
    assert (Row(400, 400),) in shapes


class Scripted(StepTimer):
    """Times that rise by a thousand from call to call."""

    def __init__(self) -> None:
        self.times = itertools.count(1000, 1000)

    def ns(self, shape: tuple[Row, ...]) -> int:
        return next(self.times)


def test_the_median_of_all_rounds_counts() -> None:
    calibration = Calibration(Scripted(), [(Row(1, 5),), (Row(2, 5),)])  # two calls to warm up
    told: list[tuple[int, int]] = []
    for _ in range(3):
        calibration.round(lambda done, total: told.append((done, total)))
    assert [sample.ns for sample in calibration.samples()] == [5000, 6000]
    assert told == [(1, 2), (2, 2)] * 3


def test_the_fitted_cost_says_what_it_is_of(timer: StepTimer) -> None:
    calibration = Calibration(timer, grid(60, rows=(1, 2)))
    calibration.round()
    samples = calibration.samples()
    cost = calibrated(timer, samples)
    assert cost.host.inline
    assert cost.about.startswith("tiny in float32, 1 thread(s)")
    assert cost.model.kv_token_bytes == timer.token_bytes
    assert cost.model.window == timer.spec.max_position
    assert misfit(cost, samples).worst < 0.01
    assert "off by 0.0% in the median" in table(cost, samples)
