"""The first bytes of a connection on the Unix socket decide: the native protocol's preface, or HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

__all__ = ["PREFACE", "Front"]

PREFACE = b"MSTAR\x01\r\n"


class Front(asyncio.Protocol):
    """Reads until the protocol is known, then hands the connection over, with the bytes read so far."""

    def __init__(
        self,
        native: Callable[[], asyncio.Protocol],
        http: Callable[[], asyncio.Protocol],
        *,
        seconds: float,
    ) -> None:
        self._native = native
        self._http = http
        self._seconds = seconds
        self._first = b""
        self._transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        self._patience = asyncio.get_running_loop().call_later(self._seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._first += data
        first, transport = self._first, self._transport
        if transport is None or (len(first) < len(PREFACE) and PREFACE.startswith(first)):
            return
        if self._patience is not None:
            self._patience.cancel()
        native = first.startswith(PREFACE)
        protocol = self._native() if native else self._http()
        rest = first[len(PREFACE) :] if native else first
        self._first, self._transport = b"", None
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if rest:
            protocol.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
