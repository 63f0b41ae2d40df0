"""A cell as its supervisor holds it: its processes, its generation, and what ended it the last time."""

from __future__ import annotations

from enum import StrEnum

from actors.process import ActorProcess
from actors.restarts import RestartBook, RestartPolicy
from actors.wiring import ActorSpec

__all__ = ["Cell", "CellState"]


class CellState(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DYING = "dying"
    ENDED = "ended"


class Cell:
    """One cell's actors and where it is in its life."""

    def __init__(self, name: str, specs: tuple[ActorSpec, ...], policy: RestartPolicy) -> None:
        self.name = name
        self.specs = specs
        self.actors = tuple(spec.name for spec in specs)
        self.state = CellState.WAITING
        self.generation = 0
        self.processes: dict[str, ActorProcess] = {}
        self.book = RestartBook(policy)
        self.spawned = 0.0
        self.died = 0.0
        self.due = 0.0
        self.culprit = ""
        self.cause = ""
        self.traceback = ""
