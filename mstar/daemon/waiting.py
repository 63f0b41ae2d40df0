"""Who answers while nobody can serve yet: 503 with the stage, to HTTP and to native clients.

Used before the first gateway exists, that is, while the model's files are fetched.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

import msgspec

from mstar.client.frames import PREFACE, frame

__all__ = ["WaitingRoom"]

# How long a client may take to say what it wants, or to read the answer, in seconds.
_PATIENCE = 5.0
_LONGEST_HEAD = 64 << 10


def _error(stage: str) -> dict[str, object]:
    return {
        "message": f"the server is starting: {stage}",
        "type": "server_error",
        "param": None,
        "code": "not_ready",
    }


def answer(head: bytes, stage: str) -> bytes | None:
    """What to send to a client whose first bytes are ``head``; None while they do not tell enough."""
    if head[: len(PREFACE)] == PREFACE[: len(head)]:
        if len(head) < len(PREFACE):
            return None
        return frame({"id": 0, "event": "error", "error": {**_error(stage), "status": 503}})
    if b"\r\n\r\n" not in head and len(head) < _LONGEST_HEAD:
        return None
    alive = head.startswith((b"GET /health ", b"GET /health?"))
    status = HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE
    body = msgspec.json.encode({"status": "starting", "stage": stage} if alive else {"error": _error(stage)})
    retry = "" if alive else "Retry-After: 1\r\n"
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n{retry}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body


class Visitor(asyncio.Protocol):
    """One connection: answered once, then read until the client closes it."""

    def __init__(self, stage: Callable[[], str]) -> None:
        self._stage = stage
        self._head = bytearray()
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(_PATIENCE, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return  # The rest of a body: read, so that closing does not reset the answer away.
        self._head += data
        reply = answer(bytes(self._head), self._stage())
        if reply is not None:
            self._answered = True
            self._head.clear()
            self._transport.write(reply)
            if self._transport.can_write_eof():
                self._transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()


class WaitingRoom:
    """Accepts on duplicates of listening sockets until it is closed; the sockets themselves stay open."""

    def __init__(self, listeners: list[socket.socket], stage: Callable[[], str]) -> None:
        self._listeners, self._stage = listeners, stage
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> WaitingRoom:
        for listener in self._listeners:
            self._servers.append(await _accepting(lambda: Visitor(self._stage), listener.dup()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()


async def _accepting(make: Callable[[], asyncio.Protocol], listener: socket.socket) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    if listener.family != socket.AF_UNIX:
        return await loop.create_server(make, sock=listener)
    try:
        # From 3.13 on asyncio's server would remove the path that others still listen on.
        return await loop.create_unix_server(make, sock=listener, cleanup_socket=False)  # type: ignore[call-arg]
    except TypeError:
        return await loop.create_unix_server(make, sock=listener)
