"""The pipeline: which steps are planned, which have landed, and what may return because of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Pipeline"]

Step = TypeVar("Step")
Returnable = TypeVar("Returnable")


class Pipeline(Generic[Step, Returnable]):
    """Steps in flight, at most ``depth + 1``, and things that return when a step has landed.

    Nothing else knows whether a step has landed: a slot, page or lease handed to ``retire`` comes
    back from ``land`` once the last step that names it is among the landed ones. Plans run in order on
    every rank, so that is enough for what only plans name; what ranks read elsewhere is ``lent``.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.planned = 0
        self.landed = 0
        self._steps: deque[tuple[int, Step]] = deque()
        self._retiring: deque[tuple[int, Returnable]] = deque()
        self._lent: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def in_flight(self) -> int:
        """Steps planned and not landed."""
        return self.planned - self.landed

    @property
    def full(self) -> bool:
        """Whether the oldest step must land before anything else is planned."""
        return self.planned - self.landed > self.depth

    @property
    def next_seq(self) -> int:
        """The number of the next step to plan, from 1."""
        return self.planned + 1

    @property
    def oldest(self) -> int:
        """The number of the oldest step in flight."""
        return self.landed + 1

    def push(self, seq: int, step: Step) -> None:
        """Step ``seq`` was planned. Raises RuntimeError out of order or over depth."""
        if seq != self.planned + 1 or self.full:
            raise RuntimeError(f"step {seq} planned after {self.planned} with {self.in_flight} in flight")
        self.planned = seq
        self._steps.append((seq, step))

    def retire(self, seq: int, item: Returnable) -> None:
        """``item`` may return once step ``seq`` has landed; ``seq`` never decreases from call to call."""
        if self._retiring and self._retiring[-1][0] > seq:
            raise RuntimeError(f"retired for step {seq} after one for {self._retiring[-1][0]}")
        self._retiring.append((seq, item))

    @property
    def retiring(self) -> int:
        """How many things wait for a step to land, or for every rank to have read it."""
        return len(self._retiring) + len(self._lent)

    def lend(self, seq: int, give_back: Callable[[], None]) -> None:
        """Memory outside the plans, which every rank reads when it runs step ``seq``."""
        self._lent.append((seq, give_back))

    def read(self, seq: int) -> None:
        """Every rank has run step ``seq``, and it has landed here: give back what it was lent."""
        lent = self._lent
        while lent and lent[0][0] <= seq:
            lent.popleft()[1]()

    def land(self, seq: int) -> tuple[Step, list[Returnable]]:
        """The oldest step landed: what was pushed with it, and all that may return now."""
        if not self._steps or self._steps[0][0] != seq:
            raise RuntimeError(f"step {seq} landed, the oldest in flight is {self.oldest}")
        self.landed = seq
        _, step = self._steps.popleft()
        retiring = self._retiring
        back: list[Returnable] = []
        while retiring and retiring[0][0] <= seq:
            back.append(retiring.popleft()[1])
        return step, back
