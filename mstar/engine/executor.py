"""Executor: validates a StepPlan against this rank's state, applies it and launches it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mstar.engine.device import Device
from mstar.engine.results import ResultSlot
from mstar.engine.slot_table import PlanMismatch, SlotTable
from mstar.messages.step import Bind, StepPlan

__all__ = ["Executor", "RowRefused", "SlotState"]


_NOBODY: Mapping[int, str] = MappingProxyType({})


class RowRefused(Exception):
    """One row cannot be prepared, for a reason that is the same on every rank; only that row fails."""


class SlotState:
    """What a node keeps by slot beside its table; the model runner implements it."""

    def bind(self, bind: Bind, tokens: NDArray[np.int32]) -> None:
        """``bind`` takes a slot; ``tokens`` int32 [length] is valid only during the call.

        May raise RowRefused; the slot may still be named by rows until the leader has dropped it.
        """

    def drop(self, slot: int, request: int) -> None:
        """``request`` is gone from ``slot``."""

    def input_landed(self, slot: int, request: int) -> None:
        """The last chunk of the input of ``request`` has landed; it is not needed any more."""


class Executor:
    """Runs plans in order on one rank. ``tables`` and ``states`` are its nodes'; a plan names one.

    ``inputs(bind)`` opens the input that a bind names.
    """

    def __init__(
        self,
        tables: Sequence[SlotTable],
        states: Sequence[SlotState],
        device: Device,
        inputs: Callable[[Bind], NDArray[np.int32]],
    ) -> None:
        self.tables = tuple(tables)
        self._states = tuple(states)
        self._device = device
        self._inputs = inputs
        self._finals: deque[tuple[int, int, int, int]] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Validate, apply, launch.

        Raises PlanMismatch before any row is touched when the plan contradicts this rank's state, and
        whatever the device lets through.
        """
        node = plan.node
        if not 0 <= node < len(self.tables):
            raise PlanMismatch(plan.seq, -1, "node", node, f"0 to {len(self.tables) - 1}")
        table, state = self.tables[node], self._states[node]
        dropped = table.change(plan)
        if dropped:
            for request, slot in zip(plan.drops.tolist(), dropped, strict=True):
                state.drop(slot, request)
        refused = self._bind(plan.binds, state) if plan.binds else _NOBODY
        table.advance(plan)
        if plan.chunk_starts.size:
            self._hold(plan)
        self._device.launch(plan, refused)

    def _bind(self, binds: Sequence[Bind], state: SlotState) -> dict[int, str]:
        """Prepare the rows of ``binds``; of those that cannot be, slot -> why."""
        refused: dict[int, str] = {}
        for bind in binds:
            try:
                state.bind(bind, self._inputs(bind))
            except RowRefused as error:
                refused[bind.slot] = str(error)
        return refused

    def landed(self, seq: int, *, flush: bool) -> ResultSlot | None:
        """The results of step ``seq`` once it has landed."""
        results = self._device.landed(seq, flush=flush)
        finals = self._finals
        while results is not None and finals and finals[0][0] <= seq:
            _, node, slot, request = finals.popleft()
            if self.tables[node].owner[slot] == request:
                self._states[node].input_landed(slot, request)
        return results

    def drawn(self, seq: int) -> ResultSlot | None:
        """The tokens that rows of ``seq`` drew late, once they are there."""
        return self._device.drawn(seq)

    def _hold(self, plan: StepPlan) -> None:
        """Remember whose input ends in ``plan``: it is held until the step has landed."""
        final = (plan.chunk_ends == plan.chunk_totals) & (plan.chunk_ends > 0)
        for row in final.nonzero()[0].tolist():
            self._finals.append((plan.seq, plan.node, int(plan.slot[row]), int(plan.request[row])))
