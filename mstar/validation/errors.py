"""The one error of this room: a request that cannot be served as it stands."""

from __future__ import annotations

__all__ = ["RequestInvalid"]


class RequestInvalid(Exception):
    """A request was refused: ``message`` says what was wrong and what is allowed.

    ``param`` is the path of the field (``messages[2].content``) or None, ``code`` a stable word for
    programs or None, ``status`` the HTTP status, 400 to 499.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
