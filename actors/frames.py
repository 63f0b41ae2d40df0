"""What the supervisor and an actor tell each other over their control socket. Data never travels here."""

from __future__ import annotations

import msgspec

__all__ = [
    "Answer",
    "Ask",
    "Attachment",
    "Boot",
    "CellLost",
    "CellReady",
    "Failed",
    "FromActor",
    "FromSupervisor",
    "Ready",
    "Stage",
    "Status",
    "Stop",
]


class Attachment(msgspec.Struct, frozen=True, array_like=True):
    """One end of a shared object.

    kind is "channel", "slab" or "steps"; role is "writer" or "reader" of a ring or step ring, "owner" or
    "user" of a slab. peers are the actors at the other end(s), in the order of their reader index for a step
    ring's writer; index is a step reader's own. fd is an inherited number in `Boot`, a place in the
    datagram's list elsewhere.
    """

    kind: str
    name: str
    role: str
    peers: tuple[str, ...]
    index: int
    layout: tuple[int, ...]
    fd: int


class Boot(msgspec.Struct, frozen=True, tag=True):
    """The first frame: everything an actor is started with. Descriptors are the numbers it inherited."""

    name: str
    cell: str
    generation: int
    target: str
    config: bytes
    path: tuple[str, ...]
    loop: str
    board: int
    lines: dict[str, int]
    doorbells: dict[str, int]
    fds: dict[str, int]
    attachments: tuple[Attachment, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The order to finish."""


class CellLost(msgspec.Struct, frozen=True, tag=True):
    """A cell died: these of its actors shared something with the receiver, and it is poisoned."""

    cell: str
    actors: tuple[str, ...]
    reason: str


class CellReady(msgspec.Struct, frozen=True, tag=True):
    """A cell's actors are ready; what they share with the receiver, if it was replaced, comes along."""

    cell: str
    actors: tuple[str, ...]
    generation: int
    attachments: tuple[Attachment, ...]


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to the question `id`; error is empty unless it failed."""

    id: int
    payload: bytes
    error: str


class Stage(msgspec.Struct, frozen=True, tag=True):
    """A named stage of the start-up, and how much of it is done (0 of 0 where nothing is counted)."""

    name: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The actor's setup is finished."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The actor raised and is about to exit. during is "import", "setup", "run" or "teardown"."""

    during: str
    error: str
    traceback: str


class Status(msgspec.Struct, frozen=True, tag=True):
    """A status payload; the latest of a kind counts."""

    kind: str
    payload: bytes


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A question to the supervisor."""

    id: int
    kind: str
    payload: bytes


FromSupervisor = Boot | Stop | CellLost | CellReady | Answer
FromActor = Stage | Ready | Failed | Status | Ask
