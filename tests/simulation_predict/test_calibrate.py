"""The fit: it finds the prices behind the steps, and stands a disturbed one."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from mstar.simulation.calibrate import Sample, fit, misfit, nonnegative
from mstar.simulation.cost import CostTable, ModelFacts
from mstar.worker.budget import StepWork

TRUTH = CostTable(
    ModelFacts("toy", 4096, 64),
    tokens=(1, 8, 64, 2048),
    tokens_ns=(1e6, 2e6, 9e6, 3e8),
    row_ns=1e5,
    read_ns=20.0,
    past_ns=30.0,
    own_ns=25.0,
)
WORKS = [
    *(StepWork(rows, rows, rows * length) for rows in (1, 2, 4, 8, 16) for length in (64, 512, 2000)),
    *(StepWork(size, 1, size * (size + start)) for size in (16, 64, 256, 1024, 2048) for start in (0, 1000)),
    *(StepWork(size + 8, 9, size * (size + 500) + 800) for size in (56, 120, 248, 1000)),
]


def samples() -> list[Sample]:
    return [Sample(work, TRUTH.ns(work, 1)) for work in WORKS]


def test_the_fit_finds_the_cost_that_made_the_samples() -> None:
    found = fit(samples(), TRUTH.model)
    assert misfit(found, samples()).worst < 0.01
    assert found.row_ns == pytest.approx(TRUTH.row_ns, rel=0.01)
    assert found.past_ns == pytest.approx(TRUTH.past_ns, rel=0.01)


def test_a_step_that_something_else_delayed_moves_the_fit_little() -> None:
    disturbed = samples()
    disturbed[5] = disturbed[5]._replace(ns=8 * disturbed[5].ns)
    disturbed[20] = disturbed[20]._replace(ns=3 * disturbed[20].ns)
    assert misfit(fit(disturbed, TRUTH.model), samples()).worst < 0.05


def test_noise_does_not_turn_the_price_of_tokens_into_one_of_pairs() -> None:
    noise = np.random.default_rng(1)
    steady = msgspec.structs.replace(TRUTH, tokens=(1, 2048), tokens_ns=(1e6, 3e8))
    noisy = [Sample(work, steady.ns(work, 1) * float(noise.uniform(0.97, 1.03))) for work in WORKS]
    found = fit(noisy, TRUTH.model)
    slopes = np.diff(found.tokens_ns) / np.diff(found.tokens)
    assert slopes[-3:] == pytest.approx([299e6 / 2047] * 3, rel=0.15)
    unseen = StepWork(1500, 1, 1500 * 1500)
    assert found.ns(unseen, 1) == pytest.approx(steady.ns(unseen, 1), rel=0.03)


def test_no_price_is_negative_however_noisy_the_steps() -> None:
    noise = np.random.default_rng(0)
    noisy = [Sample(one.work, one.ns * float(noise.uniform(0.4, 1.8))) for one in samples()]
    found = fit(noisy, TRUTH.model)
    assert min(found.row_ns, found.read_ns, found.past_ns, found.own_ns, *found.tokens_ns) >= 0


def test_one_size_of_step_is_not_enough() -> None:
    with pytest.raises(ValueError, match="1 sizes of step"):
        fit(samples()[:1], TRUTH.model)


def test_least_squares_stop_at_zero() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative(matrix, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert nonnegative(matrix, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])
