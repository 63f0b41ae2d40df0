"""Poll, spin, announce, fence, re-check, sleep: how a consumer waits and a producer wakes it.

The consumer owns an epoch in its board line, odd while it sleeps. The producer publishes, fences, reads the
epoch and rings once per odd value. The consumer makes it odd, fences, looks for work once more and only then
sleeps. Whichever fence comes second sees the other's store, so no wake-up is lost. No event loop here: the
caller does the sleeping, on the doorbell and with a time-out after which it looks again all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shm.board import Line
from shm.doorbell import Doorbell
from shm.fence import fence

__all__ = ["Bell", "Sleeper", "SleeperStatistics", "spin_budget"]

_WORTH_SPINNING_NS = 5_000_000
_LEAST_SPIN_NS = 20_000
_POLLS_PER_LOOK = range(8)  # looking at the clock costs as much as two polls


class SleeperStatistics(NamedTuple):
    """Counts since the start; `lost` is the one that must stay 0."""

    spins: int
    hits: int
    announces: int
    rechecks: int
    safety_polls: int
    lost: int


class Sleeper:
    """The consumer's side of one board line. After every wake-up, for whatever reason, call `awake` before
    announcing again: a producer that has rung for an epoch does not ring for it twice.
    """

    __slots__ = (
        "_at",
        "_epoch",
        "_words",
        "announces",
        "hits",
        "line",
        "lost",
        "rechecks",
        "safety_polls",
        "spins",
    )

    def __init__(self, line: Line) -> None:
        self.line = line
        self._words = line.words
        self._at = line.offset
        # a successor goes on counting: peers remember the last epoch they rang
        self._epoch = (line.epoch + 1) & ~1
        self._words[self._at] = self._epoch
        self.spins = self.hits = self.announces = self.rechecks = self.safety_polls = self.lost = 0

    def spin(self, has_work: Callable[[], bool], budget_ns: int, clock: Callable[[], int]) -> bool:
        """Poll for up to `budget_ns` of `clock` (nanoseconds); True as soon as there is work."""
        if has_work():
            return True
        if budget_ns <= 0:
            return False
        self.spins += 1
        end = clock() + budget_ns
        while True:
            for _ in _POLLS_PER_LOOK:
                if has_work():
                    self.hits += 1
                    return True
            if clock() >= end:
                return False

    def announce(self, has_work: Callable[[], bool]) -> bool:
        """Say "I sleep", then look once more. True: the caller may sleep. False: work has arrived."""
        epoch = self._epoch = self._epoch + 1 | 1
        self._words[self._at] = epoch
        fence()
        self.announces += 1
        if has_work():
            self.rechecks += 1
            self._words[self._at] = self._epoch = epoch + 1
            return False
        return True

    def awake(self) -> None:
        """Say "I no longer sleep"."""
        if self._epoch & 1:
            self._epoch += 1
            self._words[self._at] = self._epoch

    def safety_poll(self, has_work: Callable[[], bool], *, rung: bool) -> bool:
        """The time-out of a sleep has passed: look again. Work that nobody rang for is counted as lost."""
        self.safety_polls += 1
        if not has_work():
            return False
        if not rung:
            self.lost += 1
        return True

    def statistics(self) -> SleeperStatistics:
        return SleeperStatistics(
            self.spins, self.hits, self.announces, self.rechecks, self.safety_polls, self.lost
        )


class Bell:
    """The producer's side: the consumer's line and its doorbell."""

    __slots__ = ("_at", "_ring", "_rung", "_words", "doorbell", "line", "rings")

    def __init__(self, line: Line, doorbell: Doorbell) -> None:
        self.line = line
        self.doorbell = doorbell
        self._ring = doorbell.ring
        self._words = line.words
        self._at = line.offset
        self._rung = 0
        self.rings = 0

    def notify(self) -> bool:
        """After publishing: fence, then ring if the consumer sleeps unrung; says whether it rang."""
        fence()
        epoch = self._words[self._at]
        if epoch & 1 and epoch != self._rung:
            return self.rouse()
        return False

    def rouse(self) -> bool:
        """`notify` for a caller that has fenced already, for several bells at once."""
        epoch = self._words[self._at]
        if epoch & 1 and epoch != self._rung:
            self._rung = epoch
            self.rings += 1
            self._ring()
            return True
        return False


def spin_budget(cores: int, actors: int, expected_gap_ns: int) -> int:
    """How long to spin before sleeping, in nanoseconds.

    0 where cores are fewer than actors + 1, since a spinner would then hold the core its peer needs; 0 where
    the expected gap is so long (over 5 ms) that the 0.1 ms of a wake-up is under 2 % of it; else the gap and
    a quarter more, 20 us at least.
    """
    if cores < actors + 1 or not 0 < expected_gap_ns <= _WORTH_SPINNING_NS:
        return 0
    return max(_LEAST_SPIN_NS, expected_gap_ns + expected_gap_ns // 4)
