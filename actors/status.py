"""What a supervisor shows of the house: the snapshot behind metrics and status pages."""

from __future__ import annotations

import time
from typing import NamedTuple

from actors.cell import Cell
from actors.fabric import FabricStatistics
from actors.process import ActorState
from shm.board import Line

__all__ = ["ActorStatistics", "SupervisorStatistics", "actor_statistics"]


class ActorStatistics(NamedTuple):
    """One actor. Ages in seconds; beat_age is None before the first heartbeat; restarts and generation are
    its cell's.
    """

    actor: str
    cell: str
    pid: int
    state: str
    stage: str
    stage_age: float
    generation: int
    restarts: int
    beat_age: float | None
    step: int


class SupervisorStatistics(NamedTuple):
    """Every actor by name, every cell's state, and the shared memory they hang on."""

    actors: dict[str, ActorStatistics]
    cells: dict[str, str]
    fabric: FabricStatistics


def actor_statistics(actor: str, cell: Cell, line: Line | None, now: float) -> ActorStatistics:
    """`line` is None where there is no shared memory (any more); `now` is of the supervisor's clock."""
    process = cell.processes.get(actor)
    if process is None:
        state, stage, since, pid = ActorState.WAITING, "", now, 0
    else:
        state, stage, since, pid = process.state, process.label, process.stage_since, process.pid
    beat = line.beat if line is not None else 0
    return ActorStatistics(
        actor=actor,
        cell=cell.name,
        pid=pid,
        state=str(state),
        stage=stage,
        stage_age=now - since,
        generation=cell.generation,
        restarts=cell.book.restarts,
        beat_age=(time.monotonic_ns() - beat) / 1e9 if beat else None,
        step=line.step if line is not None else 0,
    )
