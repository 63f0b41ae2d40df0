"""One id of a native connection: its request's deltas as events, and its one terminal event."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from mstar.gateway.errors import ApiError
from mstar.gateway.request import DONE, Request

__all__ = ["NativeStream", "cancelled", "error_event", "held"]


class Link(Protocol):
    """The connection, as its streams see it."""

    late: dict[NativeStream, None]

    @property
    def behind(self) -> bool: ...

    def owns(self, stream: NativeStream) -> bool: ...

    def send(self, event: dict[str, Any]) -> None: ...

    def end(self, ident: int, event: dict[str, Any]) -> None: ...


class NativeStream:
    """A sink that writes frames of one id. Without ``stream`` it speaks at the end only."""

    def __init__(self, connection: Link, ident: int) -> None:
        self.connection = connection
        self.ident = ident
        self.streamed = False
        self.request: Request | None = None
        self.task: asyncio.Task[None] | None = None

    def flush(self, request: Request) -> None:
        connection = self.connection
        ended = request.outcome is not None
        if not connection.owns(self) or (not ended and not self.streamed):
            return
        if connection.behind:
            connection.late[self] = None
            return
        for choice in request.choices:
            if not choice.changed:
                continue
            delta = choice.take()
            if delta.text or delta.tokens:
                logprobs = delta.scores if choice.top >= 0 else None
                connection.send(
                    {
                        "id": self.ident,
                        "event": "delta",
                        "choice": choice.index,
                        "text": delta.text,
                        "tokens": delta.tokens,
                        "logprobs": logprobs,
                    }
                )
            if delta.reason is not None:
                finish = {"id": self.ident, "event": "finish", "choice": choice.index, "reason": delta.reason}
                connection.send(finish)
        if request.outcome == DONE:
            connection.end(self.ident, {"event": "done", "usage": request.usage.object()})
        elif ended:
            connection.end(self.ident, error_event(request.failure or cancelled()))


def cancelled() -> ApiError:
    return ApiError(499, "The request was cancelled by its client.", code="cancelled")


def error_event(error: ApiError) -> dict[str, Any]:
    """The terminal event of a request that failed."""
    found = {**error.object(), "status": error.status}
    if error.retry_after is not None:
        found["retry_after"] = error.retry_after
    return {"event": "error", "error": found}


def held(request: Request) -> int:
    """Roughly the bytes that wait in a request."""
    return sum(
        sum(map(len, choice.texts))
        + 8 * len(choice.tokens)
        + 100 * len(choice.scores) * (1 + max(choice.top, 0))
        for choice in request.choices
    )
