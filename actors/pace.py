"""How soon the supervisor looks at its actors again."""

from __future__ import annotations

from collections.abc import Collection

from shm.board import Line

__all__ = ["BUSY", "IDLE", "Pace"]

BUSY = 0.025  # seconds
IDLE = 0.1
_SETTLED = 1.0


class Pace:
    """25 ms while anything moves; 100 ms once every actor has slept for a second, since a timer that wakes a
    sleeping core forty times a second costs half a percent of it and nobody waits for an idle house.

    A small process closes its control socket, and so is noticed, at once in either case; this bounds how long
    the death of a large one, whose memory takes its time, stays unseen.
    """

    def __init__(self, lines: Collection[Line]) -> None:
        self._lines = tuple(lines)
        self._seen: list[tuple[int, int]] = []
        self._since = 0.0

    def interval(self, now: float, *, settled: bool) -> float:
        """Seconds until the next look. `settled`: no cell is starting, dying or waiting to start."""
        seen = [(line.epoch, line.step) for line in self._lines]
        if not settled or seen != self._seen or not all(epoch & 1 for epoch, _ in seen):
            self._seen = seen
            self._since = now
        return IDLE if now - self._since >= _SETTLED else BUSY
