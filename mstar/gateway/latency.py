"""Histograms of the times that clients feel, cheap enough for every token."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

__all__ = ["Histogram", "HistogramSnapshot", "Latencies"]

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class HistogramSnapshot(NamedTuple):
    """Upper bounds in seconds, counts at or below each (cumulative), and the number and sum of all."""

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    total: int
    sum: float


class Histogram:
    """Counts observations in seconds by bucket; an observation costs a bisection and two additions."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def statistics(self) -> HistogramSnapshot:
        """A snapshot."""
        cumulative, total = [], 0
        for value in self._counts:
            total += value
            cumulative.append(total)
        return HistogramSnapshot(self._bounds, tuple(cumulative[:-1]), total, self._sum)


class Latencies:
    """Time to the first token, between two tokens of a sequence, and of whole requests."""

    def __init__(self) -> None:
        self.first = Histogram(_FIRST)
        self.gap = Histogram(_GAP)
        self.whole = Histogram(_WHOLE)
