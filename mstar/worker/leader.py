"""Leader: plans a cell's steps, hands them to every rank, runs them itself, and collects what they gave.

Plain and synchronous: the rank actor, the simulator and the tests drive it turn by turn.
"""

from __future__ import annotations

from typing import Protocol

from mstar.engine.executor import Executor
from mstar.engine.results import ResultSlot
from mstar.messages.step import StepPlan
from mstar.worker.outcome import Landed, StepResult
from mstar.worker.scheduler import MicroScheduler
from shm.steps import StepSlot

__all__ = ["FollowerFailed", "Leader", "StepOutlet"]


class FollowerFailed(Exception):
    """A rank of the cell could not run a step; the cell must restart."""

    def __init__(self, reader: int, message: str) -> None:
        super().__init__(f"follower {reader + 1} of the cell failed: {message}")
        self.reader = reader


class StepOutlet(Protocol):
    """The writer's end of a cell's step ring (shm.steps.StepWriter)."""

    def begin(self, seq: int) -> StepSlot: ...
    def commit(self, seq: int) -> None: ...
    def done(self, reader: int) -> int: ...
    def error(self, reader: int) -> str | None: ...


class Leader:
    """Decides for ``readers`` followers that read a ring of ``slots`` steps.

    The scheduler opens its steps with ``steps.begin``. A follower may be as many steps behind as the ring
    holds: then nothing is planned until it catches up.
    """

    def __init__(
        self, scheduler: MicroScheduler, executor: Executor, steps: StepOutlet, readers: int, slots: int
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._steps = steps
        self._readers = range(readers)
        self._slots = slots
        self._read = 0

    @property
    def behind(self) -> bool:
        """Whether the ring is full of steps that a follower has not run yet."""
        return bool(self._readers) and self.scheduler.pipeline.planned - self._read >= self._slots

    @property
    def moved(self) -> bool:
        """Whether followers have run steps that were waited for and not seen by ``plan`` or ``collect``."""
        if not self._readers or not (self.behind or self.scheduler.pipeline.retiring):
            return False
        return min(self._steps.done(reader) for reader in self._readers) > self._read

    def plan(self) -> StepPlan | None:
        """The next step, if there is one to run, the pipeline has room and every follower keeps up.

        Raises FollowerFailed.
        """
        if self._readers:
            self._look()
            if self.behind:
                return None
        if self.scheduler.drawing is not None:
            self._take_draws()
        return self.scheduler.plan()

    def launch(self, plan: StepPlan) -> None:
        """Publish ``plan``, then run it here. Raises what Executor.launch raises."""
        self._steps.commit(plan.seq)
        self.executor.launch(plan)

    def collect(self, *, flush: bool) -> Landed | None:
        """What the oldest step in flight gave, if it has landed. ``flush``: nothing is launched before it."""
        scheduler = self.scheduler
        pipeline = scheduler.pipeline
        if not pipeline.in_flight:
            if pipeline.retiring:
                self._look()
            return None
        seq = pipeline.oldest
        results = self.executor.landed(seq, flush=flush)
        if results is None:
            return None
        if scheduler.drawing is not None:
            self._take_draws()
        landed = scheduler.land(seq, step_result(results))
        if pipeline.retiring:
            self._look()
        return landed

    def _take_draws(self) -> None:
        """Tell the scheduler of the tokens that rows drew late, as far as they are there."""
        scheduler = self.scheduler
        while (seq := scheduler.drawing) is not None:
            results = self.executor.drawn(seq)
            if results is None:
                return
            scheduler.drawn(seq, None if results.failed is not None else results.tokens)

    def _look(self) -> None:
        """See how far every rank has come, and give back what they have read."""
        steps, landed = self._steps, self.scheduler.pipeline.landed
        read = landed
        if self._readers:
            self._read = min(steps.done(reader) for reader in self._readers)
            read = min(read, self._read)
            if self._read < landed or self.behind:
                for reader in self._readers:
                    error = steps.error(reader)
                    if error is not None:
                        raise FollowerFailed(reader, error)
        self.scheduler.read(read)


def step_result(results: ResultSlot) -> StepResult:
    """What the scheduler needs of a device's results; views, valid until the slot is used again."""
    scores = (
        (results.logprob, results.top_ids, results.top_logprobs) if results.scored else (None, None, None)
    )
    return StepResult(
        results.tokens, *scores, results.failed, results.failed_slots, elapsed_ns=results.elapsed_ns
    )
