"""From measured steps to a cost: a fit that never lets more work cost less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.simulation.cost import Collective, CostTable, Host, ModelFacts, pairs

if TYPE_CHECKING:
    from mstar.worker.budget import StepWork

__all__ = ["Misfit", "Sample", "fit", "misfit"]

Columns = NDArray[np.float64]

_ROUNDS = 500
_STILL = 1e-10
_APART = 1.3
_REWEIGHTED, _NEAR, _SMOOTH = 13, 0.02, 1.0


class Sample(NamedTuple):
    """A measured step: what it ran, and its device time in nanoseconds."""

    work: StepWork
    ns: float


class Misfit(NamedTuple):
    """How far a cost is from samples, as shares of each: the median, the worst, and whose it is."""

    median: float
    worst: float
    sample: Sample


def fit(
    samples: Sequence[Sample],
    model: ModelFacts,
    *,
    host: Host | None = None,
    collective: Collective | None = None,
    about: str = "",
) -> CostTable:
    """The CostTable nearest to ``samples`` in relative error, none of its prices negative.

    Its knots are the sizes of the samples, a third apart at least. Raises ValueError with fewer than two
    sizes of step.
    """
    sizes = sorted({sample.work.tokens for sample in samples})
    if len(sizes) < 2:
        raise ValueError(f"{len(sizes)} sizes of step were measured; a cost needs two at least")
    knots = _knots(sizes)
    rows = np.array([_features(sample.work, knots) for sample in samples])
    times = np.array([sample.ns for sample in samples])
    # Every equation is divided by its own time: what counts is the share that a step is off by. Then the
    # far ones count less and less: a step that another process delayed is not a price.
    shares, ones = rows / times[:, None], np.ones(times.size)
    smooth = _smoothness(shares, knots)
    aims = np.append(ones, np.zeros(len(smooth)))
    weights = ones
    for _ in range(_REWEIGHTED):
        prices = nonnegative(
            np.vstack((shares * weights[:, None], smooth)), aims * np.append(weights, ones[: len(smooth)])
        )
        weights = 1 / np.sqrt(np.maximum(np.abs(shares @ prices - 1), _NEAR))
    steps, (row_ns, read_ns, past_ns, own_ns) = prices[: len(knots)], prices[len(knots) :]
    return CostTable(
        model=model,
        tokens=tuple(knots),
        tokens_ns=tuple(np.cumsum(steps).tolist()),
        row_ns=float(row_ns),
        read_ns=float(read_ns),
        past_ns=float(past_ns),
        own_ns=float(own_ns),
        host=host or Host(),
        collective=collective or Collective(),
        about=about,
    )


def misfit(cost: CostTable, samples: Sequence[Sample]) -> Misfit:
    """How well ``cost`` tells ``samples``, on one rank."""
    errors = [abs(cost.ns(sample.work, 1) / sample.ns - 1) for sample in samples]
    worst = int(np.argmax(errors))
    return Misfit(float(np.median(errors)), errors[worst], samples[worst])


def nonnegative(matrix: Columns, target: Columns) -> Columns:
    """The x >= 0 with the least |matrix x - target|, by the active sets of Lawson and Hanson (1974).

    ``matrix`` float64 [m, n], ``target`` float64 [m].
    """
    scale: Columns = np.sqrt((matrix * matrix).sum(axis=0))
    scale[scale == 0] = 1.0
    unit = matrix / scale
    found: Columns = np.zeros(unit.shape[1])
    free = np.zeros(unit.shape[1], bool)
    for _ in range(_ROUNDS):
        pull = unit.T @ (target - unit @ found)
        pull[free] = -np.inf
        if pull.max() <= _STILL:
            break
        free[pull.argmax()] = True
        while True:
            best = np.zeros_like(found)
            best[free] = np.linalg.lstsq(unit[:, free], target, rcond=None)[0]
            below = free & (best <= 0)
            if not below.any():
                break
            # As far towards the best as no price turns negative; those that reach 0 stay there.
            share = (found[below] / np.maximum(found[below] - best[below], 1e-300)).min()
            found += share * (best - found)
            free &= found > _STILL
            found[~free] = 0.0
        found = best
    prices: Columns = found / scale
    return prices


def _knots(sizes: Sequence[int]) -> list[int]:
    """The smallest of ascending ``sizes``, those a third larger than the one before, and the largest."""
    knots = [sizes[0]]
    for size in sizes[1:]:
        if size >= knots[-1] * _APART:
            knots.append(size)
    if knots[-1] != sizes[-1]:
        knots[-1] = sizes[-1]
    return knots if len(knots) > 1 else [sizes[0], sizes[-1]]


def _smoothness(shares: Columns, knots: Sequence[int]) -> Columns:
    """Weak equations that a token costs the same on both sides of a knot: float64 [knots - 2, prices].

    Steps alone often cannot tell the price of tokens from that of the pairs that come with them.
    """
    equations = np.zeros((max(len(knots) - 2, 0), shares.shape[1]))
    for place in range(1, len(knots) - 1):
        left, here, right = knots[place - 1 : place + 2]
        size = _SMOOTH * shares[:, place + 1].max() * (right - here)
        equations[place - 1, place] = size / (here - left)
        equations[place - 1, place + 1] = -size / (right - here)
    return equations


def _features(work: StepWork, knots: Sequence[int]) -> list[float]:
    """What each price is multiplied by: the rise up to each knot, rows, pairs read, before and inside."""
    places = np.interp(work.tokens, knots, np.arange(len(knots)))
    rises = np.clip(places - np.arange(len(knots)) + 1, 0.0, 1.0)
    past, own = pairs(work)
    if work.tokens == work.rows:
        return [*rises, work.rows, work.context, 0.0, 0.0]
    return [*rises, work.rows, 0.0, past, own]
