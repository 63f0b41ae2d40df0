"""Executor: validates a StepPlan against this rank's state, applies it and launches it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mstar.engine.device import Device
from mstar.engine.results import ResultSlot
from mstar.engine.slot_table import SlotTable
from mstar.messages.step import Bind, StepPlan

__all__ = ["Executor", "SlotState"]


class SlotState:
    """What a node keeps by slot beside the table; the model runner implements it."""

    def bind(self, bind: Bind, tokens: NDArray[np.int32]) -> None:
        """``bind`` takes a slot; ``tokens`` int32 [length] is valid only during the call."""

    def drop(self, slot: int) -> None:
        """The request of ``slot`` is gone."""


class Executor:
    """Runs plans in order on one rank. ``inputs(bind)`` opens the input that a bind names.

    Raises PlanMismatch before any row is touched when a plan contradicts this rank's state.
    """

    def __init__(
        self,
        table: SlotTable,
        state: SlotState,
        device: Device,
        inputs: Callable[[Bind], NDArray[np.int32]],
    ) -> None:
        self.table = table
        self._state = state
        self._device = device
        self._inputs = inputs

    def launch(self, plan: StepPlan) -> None:
        """Validate, apply, launch."""
        table, state = self.table, self._state
        for slot in table.change(plan):
            state.drop(slot)
        for bind in plan.binds:
            state.bind(bind, self._inputs(bind))
        table.advance(plan)
        self._device.launch(plan)

    def landed(self, seq: int, *, flush: bool) -> ResultSlot | None:
        """The results of step ``seq`` once it has landed."""
        return self._device.landed(seq, flush=flush)
