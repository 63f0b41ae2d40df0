"""Virtual time: a heap of events, ties broken by a seeded draw, and what each rank's own clock shows."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

__all__ = ["RankClock", "VirtualClock"]

Action = Callable[[], None]


class VirtualClock:
    """Runs actions at their times, in nanoseconds. Of those due at one time any may come first."""

    def __init__(self, random: Random) -> None:
        self.now = 0
        self.events = 0
        self._draw = random.random
        self._heap: list[tuple[int, float, int, Action]] = []
        self._queued = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_at(self) -> int | None:
        """When the next event is due, None if there is none."""
        return self._heap[0][0] if self._heap else None

    def at(self, time_ns: int, action: Action) -> None:
        """Run ``action`` at ``time_ns``, or now if that has passed."""
        self._queued += 1
        heapq.heappush(self._heap, (max(time_ns, self.now), self._draw(), self._queued, action))

    def after(self, delay_ns: int, action: Action) -> None:
        """Run ``action`` in ``delay_ns``."""
        self._queued += 1
        heapq.heappush(self._heap, (self.now + delay_ns, self._draw(), self._queued, action))

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._heap:
            return False
        self.now, _, _, action = heapq.heappop(self._heap)
        self.events += 1
        action()
        return True


class RankClock:
    """A rank's own clock: ``skew_ns`` off and running ``drift`` times as fast as the world's."""

    def __init__(self, clock: VirtualClock, skew_ns: int = 0, drift: float = 1.0) -> None:
        self._clock = clock
        self._skew_ns = skew_ns
        self._drift = drift

    def between(self, started_ns: int) -> int:
        """What this rank measures from world time ``started_ns`` to now, in nanoseconds."""
        return round((self._clock.now - started_ns) * self._drift)

    def read(self) -> int:
        """What this rank's monotonic clock shows, in nanoseconds."""
        return self._skew_ns + round(self._clock.now * self._drift)
