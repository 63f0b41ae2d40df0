"""The conductor's book: deciders, what each serves, and where the next request goes."""

from __future__ import annotations

import random
from typing import NamedTuple

from mstar.conductor.errors import NoDecider, Overloaded, UnknownDecider

__all__ = ["Conductor", "ConductorStatistics"]


class ConductorStatistics(NamedTuple):
    """Live requests per decider, which deciders are ready, and counts since the start."""

    live: tuple[int, ...]
    ready: tuple[bool, ...]
    placed: int
    refused: int
    lost: int


class Conductor:
    """Places requests on the least loaded ready decider, ties broken by a seeded draw.

    A request counts from `place` until `ended` (once, on its terminal event) or until its decider is lost.
    `capacity` is how many requests all ready deciders together may serve at once.
    """

    def __init__(self, deciders: int, capacity: int, *, seed: int = 0) -> None:
        self._capacity = capacity
        self._ready = [False] * deciders
        self._live: list[set[int]] = [set() for _ in range(deciders)]
        self._where: dict[int, int] = {}
        self._random = random.Random(seed)
        self._placed = self._refused = self._lost = 0

    def place(self, request: int) -> int:
        """Put a new request on a decider and return its index. Raises Overloaded or NoDecider."""
        ready = [index for index, flag in enumerate(self._ready) if flag]
        if not ready:
            raise NoDecider
        if len(self._where) >= self._capacity:
            self._refused += 1
            raise Overloaded(len(self._where), self._capacity)
        least = min(len(self._live[index]) for index in ready)
        decider = self._random.choice([index for index in ready if len(self._live[index]) == least])
        self._live[decider].add(request)
        self._where[request] = decider
        self._placed += 1
        return decider

    def ended(self, request: int) -> None:
        """A request had its terminal event; one that is not known (its decider was lost) changes nothing."""
        decider = self._where.pop(request, None)
        if decider is not None:
            self._live[decider].discard(request)

    def lost(self, decider: int) -> list[int]:
        """A decider is gone: returns the requests it served, oldest first, and forgets them."""
        self._check(decider)
        self._ready[decider] = False
        requests = sorted(self._live[decider])
        for request in requests:
            del self._where[request]
        self._live[decider].clear()
        self._lost += len(requests)
        return requests

    def ready(self, decider: int) -> None:
        """A decider takes requests from now on."""
        self._check(decider)
        self._ready[decider] = True

    def serves(self, request: int) -> int | None:
        """The decider of a live request."""
        return self._where.get(request)

    @property
    def live(self) -> int:
        """How many requests count now."""
        return len(self._where)

    @property
    def any_ready(self) -> bool:
        """Whether a request could be placed, capacity aside."""
        return any(self._ready)

    def statistics(self) -> ConductorStatistics:
        """A snapshot of the book."""
        return ConductorStatistics(
            tuple(map(len, self._live)), tuple(self._ready), self._placed, self._refused, self._lost
        )

    def _check(self, decider: int) -> None:
        if not 0 <= decider < len(self._ready):
            raise UnknownDecider(decider, len(self._ready))
