"""What a supervisor tells its composition root while it starts, watches and restarts actors."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ActorEnded",
    "ActorReady",
    "ActorSpawned",
    "CellDied",
    "CellRestarting",
    "CellStarted",
    "StageEnded",
    "StageReport",
    "SupervisorEvent",
]


class ActorSpawned(NamedTuple):
    """A process exists and has begun to start."""

    actor: str
    cell: str
    pid: int
    generation: int


class StageReport(NamedTuple):
    """An actor is at `stage`, `done` of `total` (0 of 0 where nothing is counted), `seconds` after the stage
    began.
    """

    actor: str
    cell: str
    stage: str
    done: int
    total: int
    seconds: float


class StageEnded(NamedTuple):
    """A stage of the start-up took `seconds`."""

    actor: str
    cell: str
    stage: str
    seconds: float


class ActorReady(NamedTuple):
    """An actor's setup is finished, `seconds` after it was spawned."""

    actor: str
    cell: str
    seconds: float


class CellStarted(NamedTuple):
    """All actors of a cell are ready, `seconds` after the first was spawned."""

    cell: str
    generation: int
    seconds: float


class CellDied(NamedTuple):
    """`actor` begins to die, or failed, and takes its cell along. The reason may be provisional."""

    cell: str
    actor: str
    reason: str


class ActorEnded(NamedTuple):
    """A process is gone and reaped. `cause` is final."""

    actor: str
    cell: str
    pid: int
    cause: str


class CellRestarting(NamedTuple):
    """A cell starts again in `delay` seconds, for the `attempt`th time in a row."""

    cell: str
    generation: int
    attempt: int
    delay: float
    cause: str


SupervisorEvent = (
    ActorSpawned
    | StageReport
    | StageEnded
    | ActorReady
    | CellStarted
    | CellDied
    | ActorEnded
    | CellRestarting
)
