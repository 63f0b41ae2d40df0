"""How often, and how soon, a cell that died is started again."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RestartBook", "RestartPolicy"]


class RestartPolicy(NamedTuple):
    """`limit` restarts in a row, the first after `delay` seconds, each later one `factor` times later,
    `longest` at most.

    A cell that was ready for `settled` seconds is healthy: its next death counts as the first.
    """

    limit: int = 5
    delay: float = 0.1
    factor: float = 3.0
    longest: float = 10.0
    settled: float = 60.0


class RestartBook:
    """The deaths of one cell. Times are seconds of any monotonic clock."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._ready_since: float | None = None
        self.deaths = 0
        self.restarts = 0

    def ready(self, now: float) -> None:
        """The cell is ready."""
        self._ready_since = now

    def died(self, now: float) -> float | None:
        """The cell died; how many seconds to wait before it is started again, None if it is given up."""
        policy = self._policy
        if self._ready_since is not None and now - self._ready_since >= policy.settled:
            self.deaths = 0
        self._ready_since = None
        self.deaths += 1
        if self.deaths > policy.limit:
            return None
        self.restarts += 1
        return min(policy.longest, policy.delay * policy.factor ** (self.deaths - 1))
