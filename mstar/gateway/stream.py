"""One event stream on one connection: bounded, never blocking whoever produces the tokens.

Deltas are written straight to the transport while it keeps up. Once more than a bound of bytes is unsent
the stream is behind: deltas merge in the request until the socket has drained, and a stream that stays
behind, or merges too much, is cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from mstar.gateway.errors import ApiError
from mstar.gateway.request import DONE, Delta, Request
from mstar.gateway.tuning import Tuning

__all__ = ["Chunks", "EventStream", "Ticker"]

_log = logging.getLogger(__name__)
PING = b": ping\n\n"


class Chunks(Protocol):
    """How deltas of one endpoint look on the wire."""

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def end(self, request: Request) -> bytes: ...


class Ticking(Protocol):
    """What wants to be looked at now and then, whether or not anything happened."""

    def tick(self, now: float) -> None: ...


class Ticker:
    """Looks at what is open every ``interval`` seconds; no timer runs while nothing is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._loop = loop
        self._interval = interval
        self._open: dict[Ticking, None] = {}
        self._handle: asyncio.TimerHandle | None = None

    def add(self, one: Ticking) -> None:
        """Look at ``one`` from now on."""
        self._open[one] = None
        if self._handle is None:
            self._handle = self._loop.call_later(self._interval, self._tick)

    def discard(self, one: Ticking) -> None:
        """Stop looking at ``one``."""
        self._open.pop(one, None)

    def close(self) -> None:
        """Stop altogether."""
        self._open.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _tick(self) -> None:
        self._handle = None
        now = self._loop.time()
        for one in list(self._open):
            one.tick(now)
        if self._open and self._handle is None:
            self._handle = self._loop.call_later(self._interval, self._tick)


class EventStream:
    """A sink that writes server-sent events.

    The handler waits for `started`, prepares the response, calls `open` with the transport, and waits for
    `finished`. Nothing is written before `open`; until then a failure can still become an HTTP status.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        chunks: Chunks,
        tuning: Tuning,
        on_cut: Callable[[Request], None],
    ) -> None:
        self.started: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self.request: Request | None = None
        self._loop = loop
        self._chunks = chunks
        self._tuning = tuning
        self._on_cut = on_cut
        self._transport: asyncio.WriteTransport | None = None
        self._chunked = True
        self._spoke = loop.time()
        self._behind_since: float | None = None

    def open(self, transport: asyncio.WriteTransport, *, chunked: bool) -> None:
        """The headers are out: write to ``transport`` from now on, in chunks of HTTP/1.1 or as they are."""
        self._transport = transport
        self._chunked = chunked
        if self.request is not None:
            self.flush(self.request)

    def flush(self, request: Request) -> None:
        """Write what the request gained, or leave it there while the socket is behind."""
        transport = self._transport
        if transport is None:
            if not self.started.done():
                self.started.set_result(None)
            return
        if self.finished.done() or transport.is_closing():
            return
        if self._behind_since is not None:
            return
        chunks = self._chunks
        payload = b"".join(
            [chunks.delta(choice.index, choice.take()) for choice in request.choices if choice.changed]
        )
        if request.outcome is not None:
            if request.outcome == DONE:
                payload += chunks.end(request)
            elif request.failure is not None:
                payload += error_event(request.failure)
            self.finished.set_result(None)
        if payload:
            self._write(transport, payload)

    def tick(self, now: float) -> None:
        """Ping where nothing was said for long; catch up or cut where the socket is behind."""
        transport, request = self._transport, self.request
        if request is None or self.finished.done():
            return
        if self._behind_since is None or transport is None:
            if now - self._spoke >= self._tuning.ping_seconds:
                if transport is None:
                    if not self.started.done():
                        self.started.set_result(None)
                elif not transport.is_closing():
                    self._write(transport, PING)
        elif transport.get_write_buffer_size() <= self._tuning.write_low:
            self._behind_since = None
            self.flush(request)
        elif (
            now - self._behind_since > self._tuning.slow_seconds
            or self._pending() > self._tuning.pending_bytes
        ):
            _log.info("request %d: its reader is too slow, its connection is cut", request.number)
            transport.abort()
            self._on_cut(request)

    def _pending(self) -> int:
        """Roughly the bytes that wait in the request."""
        if self.request is None:
            return 0
        total = 0
        for choice in self.request.choices:
            total += sum(map(len, choice.texts))
            total += sum([len(entry) for score in choice.scores for entry in _parts(score)])
        return total

    def _write(self, transport: asyncio.WriteTransport, payload: bytes) -> None:
        self._spoke = self._loop.time()
        if self._chunked:
            payload = b"%x\r\n%b\r\n" % (len(payload), payload)
        transport.write(payload)
        if transport.get_write_buffer_size() > self._tuning.write_high and not self.finished.done():
            self._behind_since = self._spoke


def _parts(score: object) -> tuple[bytes, ...]:
    return score if isinstance(score, tuple) else (score,) if isinstance(score, bytes) else ()


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that failed after its first byte."""
    return b"data: %b\n\n" % error.body()
