"""A few combinations of settings in which every pair of values occurs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

__all__ = ["pairwise"]

Pair = tuple[str, Any, str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations of ``factors`` (name -> its values) until every pair of values was in one.

    Greedy: the next combination begins with a missing pair, and each further value is the one that
    completes most missing pairs. The same factors always give the same list.
    """
    missing: dict[Pair, None] = {
        (one, a, other, b): None
        for one, other in combinations(factors, 2)
        for a, b in product(factors[one], factors[other])
    }
    found: list[dict[str, Any]] = []
    while missing:
        one, a, other, b = next(iter(missing))
        chosen: dict[str, Any] = {one: a, other: b}
        for name, values in factors.items():
            if name not in chosen:
                gains = [len(_pairs({**chosen, name: value}, factors) & missing.keys()) for value in values]
                chosen[name] = values[gains.index(max(gains))]
        for pair in _pairs(chosen, factors):
            missing.pop(pair, None)
        found.append({name: chosen[name] for name in factors})
    return found


def _pairs(chosen: Mapping[str, Any], factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """The pairs of values in ``chosen``."""
    names = [name for name in factors if name in chosen]
    return {(one, chosen[one], other, chosen[other]) for one, other in combinations(names, 2)}
