"""Who may ask, and what a request is called by its client."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

from aiohttp import web

from mstar.gateway.errors import ApiError

__all__ = ["Keys", "request_id"]

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
_ID = web.RequestKey("request_id", str)
LONGEST_ID = 128


class Keys:
    """The API keys of a server; without any, everybody may ask. Health and metrics need none."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, request: web.Request) -> None:
        """Raises ApiError 401 unless the request carries a key or needs none."""
        if not self._keys or request.path in OPEN_PATHS:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        offered = given.strip().encode("utf-8", "surrogateescape")
        # Every key is compared, and each in constant time: the answer's timing tells nothing.
        matches = [hmac.compare_digest(offered, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "An API key is needed: send it in the header `Authorization: Bearer KEY`."
                if not given
                else "The API key is not one of this server's.",
                code="invalid_api_key",
            )


def request_id(request: web.Request) -> str:
    """The client's x-request-id, or one of ours; it only names the request to the client."""
    found = request.get(_ID)
    if found is None:
        given = request.headers.get("x-request-id", "")
        plain = given.isascii() and given.isprintable() and 0 < len(given) <= LONGEST_ID
        found = request[_ID] = given if plain else f"req_{secrets.token_hex(12)}"
    return found
