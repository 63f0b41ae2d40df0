"""What can go wrong for a client, by what the caller can do about it."""

from __future__ import annotations

from typing import Any

__all__ = [
    "BadRequest",
    "ClientClosed",
    "ClientError",
    "ConnectionLost",
    "EngineFailed",
    "Forbidden",
    "NotFound",
    "NotReady",
    "Overloaded",
    "ProtocolError",
    "ServerError",
    "ServerUnreachable",
    "TimedOut",
    "from_error",
]


class ClientError(Exception):
    """Base of every error of the client. ``status`` is the HTTP status it stands for, 0 if there is none."""

    def __init__(
        self, message: str, *, status: int = 0, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class BadRequest(ClientError):
    """The server refused the request as it is; ``param`` names the field. Sending it again will not help."""


class Forbidden(ClientError):
    """The API key is missing or wrong."""


class NotFound(ClientError):
    """The server knows no such model or route."""


class Overloaded(ClientError):
    """The server has too much to do; try again after ``retry_after`` seconds."""

    retry_after: float = 1.0


class NotReady(ClientError):
    """The server is starting, restarting or about to stop."""


class ServerError(ClientError):
    """The server failed while it worked on the request."""


class ServerUnreachable(ClientError):
    """Nothing answers at the address; no request was sent."""


class ConnectionLost(ClientError):
    """The connection ended before the answer did; what came until then was delivered."""


class TimedOut(ClientError):
    """Nothing came from the server for ``timeout`` seconds; the request was cancelled."""


class ProtocolError(ClientError):
    """The server said something that this client does not understand."""


class ClientClosed(ClientError):
    """The client was closed, or the answer was cancelled, while it was in use."""


class EngineFailed(ClientError):
    """A private engine did not start; the message is its cause."""


def from_error(error: dict[str, Any], status: int, retry_after: float | None = None) -> ClientError:
    """The exception for an OpenAI error object and an HTTP status (0: taken from the object)."""
    status = status or int(error.get("status") or 500)
    kinds: dict[int, type[ClientError]] = {
        401: Forbidden,
        403: Forbidden,
        404: NotFound,
        429: Overloaded,
        503: NotReady,
    }
    kind = kinds.get(status, BadRequest if 400 <= status < 500 else ServerError)
    code = error.get("code")
    made = kind(
        str(error.get("message") or f"the server answered with status {status}"),
        status=status,
        code=None if code is None else str(code),
        param=error.get("param"),
    )
    if isinstance(made, Overloaded):
        made.retry_after = float(retry_after or error.get("retry_after") or made.retry_after)
    return made
