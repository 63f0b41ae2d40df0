"""The named failures of the actor runtime."""

from __future__ import annotations

__all__ = [
    "ActorsError",
    "AlreadyWaiting",
    "AskFailed",
    "CellGivenUp",
    "ControlClosed",
    "ControlCongested",
    "FrameTooLarge",
    "MalformedMessage",
    "NotMainThread",
    "ReportRefused",
    "StartFailed",
    "WiringError",
]


class ActorsError(Exception):
    """What every failure of this package derives from."""


class WiringError(ActorsError):
    """A wiring that cannot be built: a name is unknown, used twice, or a limit is exceeded."""


class NotMainThread(ActorsError):
    """Actors die with the thread that started them, so only the main thread may start them."""


class FrameTooLarge(ActorsError):
    """A control frame does not fit into one datagram of the control socket."""


class ControlClosed(ActorsError):
    """The other end of a control socket is gone."""


class ControlCongested(ActorsError):
    """Control frames wait for a peer that does not read them, and their queue is at its bound."""


class ReportRefused(ActorsError):
    """An actor reports more kinds of status than the supervisor keeps."""


class AskFailed(ActorsError):
    """The supervisor did not answer a question, or answered it with an error."""


class AlreadyWaiting(ActorsError):
    """An actor has one doorbell, so one task at most may wait for messages."""


class MalformedMessage(ActorsError):
    """A record that does not decode as the message its mailbox expects."""


class StartFailed(ActorsError):
    """The actors did not become ready; everything that had started is gone.

    `cause` is the last line of the message: the actor, what happened to it (an exception, a signal, a stage
    without progress) and where. `traceback` is the child's own, empty where it had no chance to send one.
    """

    def __init__(self, actor: str, cause: str, traceback: str = "") -> None:
        super().__init__(f"{traceback.rstrip()}\n{cause}" if traceback else cause)
        self.actor = actor
        self.cause = cause
        self.traceback = traceback


class CellGivenUp(ActorsError):
    """A cell died more often than its restarts allow; `cause` says what ended it the last time."""

    def __init__(self, cell: str, deaths: int, cause: str, traceback: str = "") -> None:
        line = f"cell {cell!r} is given up after {deaths} deaths in a row; the last cause: {cause}"
        super().__init__(f"{traceback.rstrip()}\n{line}" if traceback else line)
        self.cell = cell
        self.deaths = deaths
        self.cause = cause
        self.traceback = traceback
