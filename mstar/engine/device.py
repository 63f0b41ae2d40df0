"""Devices: where a step runs and when it has landed. Here the CPU, which is the rank itself.

On CPU the forward runs inline at launch. Landing is *withheld* for ``depth`` launches, or until
nothing is left to launch: otherwise a pipeline depth of 1 or 2 would be fiction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from mstar.engine.results import ResultRing, ResultSlot
from mstar.messages.step import StepPlan

__all__ = ["CpuDevice", "Device", "StepFailed"]

_log = logging.getLogger(__name__)


class StepFailed(Exception):
    """The forward of one step failed; its rows end, the rank goes on."""


class Device(Protocol):
    """What an Executor needs of a device."""

    def launch(self, plan: StepPlan, refused: Mapping[int, str]) -> None:
        """Run ``plan``'s rows; returns at once where the device runs beside the host.

        ``refused`` says of slots bound by this plan why they cannot run; it goes with the results.
        """
        ...

    def landed(self, seq: int, *, flush: bool) -> ResultSlot | None:
        """The results of ``seq``, or None while it runs; ``flush``: nothing is launched before it."""
        ...

    def drawn(self, seq: int) -> ResultSlot | None:
        """What rows drew late at the start of ``seq``, which is there long before the step has landed."""
        ...


class CpuDevice:
    """Runs ``forward(plan, results)`` inline and withholds landing for ``depth`` launches.

    A StepFailed ends the rows of its step; in ``lockstep`` with other ranks, which may have got through
    or wait in a collective, it is raised and ends the cell.
    """

    def __init__(
        self,
        slots: int,
        depth: int,
        forward: Callable[[StepPlan, ResultSlot], None],
        *,
        lockstep: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._depth = depth
        self._results = ResultRing(slots, depth)
        self._forward = forward
        self._lockstep = lockstep
        self._clock = clock
        self._launched = 0

    def launch(self, plan: StepPlan, refused: Mapping[int, str]) -> None:
        results = self._results.begin(plan.seq)
        self._launched = plan.seq
        if plan.request.size:
            started = self._clock()
            try:
                self._forward(plan, results)
            except StepFailed as error:
                if self._lockstep:
                    raise
                _log.exception("step %d failed, and with it its %d rows", plan.seq, plan.request.size)
                results.failed = str(error)
            results.elapsed_ns = self._clock() - started
        if refused:
            results.failed_slots = {**results.failed_slots, **refused}

    def landed(self, seq: int, *, flush: bool) -> ResultSlot | None:
        if seq > self._launched or (not flush and self._launched < seq + self._depth):
            return None
        return self._results.read(seq)

    def drawn(self, seq: int) -> ResultSlot | None:
        return self._results.read(seq) if seq <= self._launched else None
