"""Errors as clients see them: OpenAI's object, an HTTP status, and when to come again."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar.conductor.errors import NoDecider, Overloaded
from mstar.validation.errors import RequestInvalid

__all__ = ["ApiError", "as_api_error", "draining", "internal", "not_ready", "overloaded", "starting"]

RETRY_BUSY = 1
RETRY_STARTING = 5
_TYPES = {
    401: "invalid_request_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled",
}


class ApiError(Exception):
    """An answer that is an error. ``retry_after`` is in seconds, for 429 and 503."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        stage: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.stage = stage

    @property
    def type(self) -> str:
        """OpenAI's word for the kind of error."""
        if self.status in _TYPES:
            return _TYPES[self.status]
        if self.status >= 500:
            return "service_unavailable_error" if self.status == 503 else "server_error"
        return "invalid_request_error"

    def object(self) -> dict[str, Any]:
        """The error object: message, type, param, code, and the stage where the server is not ready."""
        found: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.stage is not None:
            found["stage"] = self.stage
        return found

    def body(self) -> bytes:
        """The whole answer, as JSON."""
        return msgspec.json.encode({"error": self.object()})


def as_api_error(error: RequestInvalid | Overloaded | NoDecider) -> ApiError:
    """The answer to a request that was refused before it was served."""
    if isinstance(error, RequestInvalid):
        return ApiError(error.status, error.message, param=error.param, code=error.code)
    if isinstance(error, Overloaded):
        return overloaded(str(error))
    return not_ready(str(error), "starting")


def overloaded(message: str) -> ApiError:
    """Too much at once: come again soon."""
    return ApiError(429, message, code="overloaded", retry_after=RETRY_BUSY)


def not_ready(message: str, stage: str) -> ApiError:
    """Nothing can serve the request now."""
    return ApiError(503, message, code="not_ready", retry_after=RETRY_STARTING, stage=stage)


def starting(stage: str) -> ApiError:
    """No rank is ready yet, or again; `stage` tells how far they are."""
    return not_ready(f"The model is not ready to serve ({stage}); try again a little later.", stage)


def draining() -> ApiError:
    """The server is about to stop."""
    return ApiError(
        503,
        "The server is stopping and takes no new requests.",
        code="draining",
        retry_after=RETRY_STARTING,
        stage="draining",
    )


def internal(message: str, *, status: int = 500, code: str | None = None) -> ApiError:
    """A request that was accepted and could not be finished."""
    return ApiError(status, message, code=code)
