"""Faults planted in one rank of a cell of real processes: each is a ``plant`` of tests.worker.tp_cell."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import torch

from mstar.distributed.oneshot import OneShotGroup
from mstar.engine.results import ResultSlot
from mstar.engine.runner import LanguageModelRunner
from mstar.messages.step import StepPlan, StepTail, _plan, _tail_decoder
from mstar.worker.follower import StepInlet
from shm.steps import StepSlot

__all__ = ["clock_ahead", "corrupted", "out_of_memory", "slot_digest"]

VICTIM = 1


class _Corrupted:
    """A ring of which step ``seq`` reads changed: row 0 of ``column`` is one more than it was written."""

    def __init__(self, inlet: StepInlet, seq: int, column: int, fits: bool) -> None:
        self._inlet, self._seq, self._column, self._fits = inlet, seq, column, fits

    @property
    def next(self) -> int:
        return self._inlet.next

    def peek(self) -> StepSlot | None:
        slot = self._inlet.peek()
        if slot is None or self._seq != self._inlet.next:
            return slot
        # A copy: the other ranks read the same memory.
        found = SimpleNamespace(
            header=memoryview(bytearray(slot.header)).cast("Q"),
            request=slot.request.copy(),
            rows=slot.rows.copy(),
            grants=slot.grants.copy(),
            drops=slot.drops.copy(),
            tail=memoryview(bytes(slot.tail)),
        )
        found.rows[self._column, 0] += 1
        if self._fits:
            found.header[5] = slot_digest(self._seq, found)
        return cast(StepSlot, found)

    def done(self) -> None:
        self._inlet.done()

    def fail(self, message: str) -> None:
        self._inlet.fail(message)


def slot_digest(seq: int, slot: Any) -> int:
    """The digest that step ``seq`` in ``slot`` should have."""
    tail_len = slot.header[6]
    tail = _tail_decoder.decode(slot.tail[:tail_len]) if tail_len else StepTail()
    return _plan(seq, slot, tail).digest


def corrupted(seq: int, column: int, fits: bool, rank: int, inlet: StepInlet | None) -> StepInlet | None:
    """Rank 1 reads a changed step; ``fits``: with a digest as if the leader had decided that for it."""
    return _Corrupted(inlet, seq, column, fits) if rank == VICTIM and inlet is not None else inlet


def out_of_memory(seq: int, victim: int, rank: int, inlet: StepInlet | None) -> StepInlet | None:
    """The forward of step ``seq`` finds no memory on rank ``victim``, in the middle of its collectives."""
    run, add = LanguageModelRunner._run, OneShotGroup.all_reduce
    now = calls = 0

    def running(self: LanguageModelRunner, plan: StepPlan, results: ResultSlot) -> None:
        nonlocal now, calls
        now, calls = plan.seq, 0
        run(self, plan, results)

    def adding(self: OneShotGroup, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if now == seq and calls == 3:
            raise torch.OutOfMemoryError("planted")
        return add(self, x)

    if rank == victim:
        LanguageModelRunner._run = running  # type: ignore[method-assign]
        OneShotGroup.all_reduce = adding  # type: ignore[method-assign]
    return inlet


def clock_ahead(seconds: float, rank: int, inlet: StepInlet | None) -> StepInlet | None:
    """Every clock of rank 1 shows ``seconds`` more, and runs a tenth faster."""
    if rank != VICTIM:
        return inlet
    for name in ("time", "monotonic", "perf_counter"):
        shown, shown_ns = getattr(time, name), getattr(time, f"{name}_ns")
        setattr(time, name, lambda shown=shown: shown() * 1.1 + seconds)
        setattr(time, f"{name}_ns", lambda shown=shown_ns: shown() * 11 // 10 + int(seconds * 1e9))
    return inlet
