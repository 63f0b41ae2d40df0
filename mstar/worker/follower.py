"""Follower: runs the steps that its cell's leader decided, one by one, and decides nothing.

Plain and synchronous: the rank actor, the simulator and the tests drive it turn by turn.
"""

from __future__ import annotations

from typing import Protocol

from mstar.engine.executor import Executor
from mstar.messages.step import open_plan
from shm.steps import StepSlot

__all__ = ["Follower", "StepInlet"]


class StepInlet(Protocol):
    """A reader's end of a cell's step ring (shm.steps.StepReader)."""

    next: int

    def peek(self) -> StepSlot | None: ...
    def done(self) -> None: ...
    def fail(self, message: str) -> None: ...


class Follower:
    """Executes every step of the ring in order; a step that it cannot run ends it, and so the cell."""

    def __init__(self, executor: Executor, steps: StepInlet) -> None:
        self.executor = executor
        self.steps = steps
        self._landed = steps.next - 1

    def turn(self) -> bool:
        """Run the next step; False if there is none yet.

        Whatever it raises (TornRecord, DigestMismatch, PlanMismatch, a failed forward) was posted to the
        leader first.
        """
        steps = self.steps
        try:
            slot = steps.peek()
            if slot is not None:
                self.executor.launch(open_plan(steps.next, slot))
        except Exception as error:
            steps.fail(f"step {steps.next}: {type(error).__name__}: {error}")
            raise
        if slot is not None:
            steps.done()
        self._collect(flush=slot is None)
        return slot is not None

    def _collect(self, *, flush: bool) -> None:
        """Let go of what the steps held that have landed here."""
        while (
            self._landed + 1 < self.steps.next
            and self.executor.landed(self._landed + 1, flush=flush) is not None
        ):
            self._landed += 1
