"""Devices: where a step runs and when it has landed. Here the CPU, which is the rank itself.

On CPU the forward runs inline at launch. Landing is *withheld* for ``depth`` launches, or until
nothing is left to launch: otherwise a pipeline depth of 1 or 2 would be fiction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from mstar.engine.results import ResultRing, ResultSlot
from mstar.messages.step import StepPlan

__all__ = ["CpuDevice", "Device", "StepFailed"]

_log = logging.getLogger(__name__)


class StepFailed(Exception):
    """The forward of one step failed; its rows end, the rank goes on."""


class Device(Protocol):
    """What an Executor needs of a device."""

    def launch(self, plan: StepPlan) -> None:
        """Run ``plan``'s rows; returns at once where the device runs beside the host."""
        ...

    def landed(self, seq: int, *, flush: bool) -> ResultSlot | None:
        """The results of ``seq``, or None while it runs; ``flush``: nothing is launched before it."""
        ...


class CpuDevice:
    """Runs ``forward(plan, results)`` inline and withholds landing for ``depth`` launches."""

    def __init__(self, slots: int, depth: int, forward: Callable[[StepPlan, ResultSlot], None]) -> None:
        self._depth = depth
        self._results = ResultRing(slots, depth)
        self._forward = forward
        self._launched = 0

    def launch(self, plan: StepPlan) -> None:
        results = self._results.begin(plan.seq)
        self._launched = plan.seq
        if plan.request.size:
            try:
                self._forward(plan, results)
            except StepFailed as error:
                _log.exception("step %d failed, and with it its %d rows", plan.seq, plan.request.size)
                results.failed = str(error)

    def landed(self, seq: int, *, flush: bool) -> ResultSlot | None:
        if seq > self._launched or (not flush and self._launched < seq + self._depth):
            return None
        return self._results.read(seq)
