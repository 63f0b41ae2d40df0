"""The native protocol: many requests on one connection to a Unix socket, cancelled one by one."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, cast

from mstar.client.errors import (
    ClientClosed,
    ClientError,
    ConnectionLost,
    ProtocolError,
    ServerUnreachable,
    TimedOut,
    from_error,
)
from mstar.client.frames import PREFACE, FrameReader, frame
from mstar.client.transport import CHUNKS, Kind
from mstar.client.types import Chunk, Usage, entries

__all__ = ["NativeTransport"]

# Unread bytes of one answer at which the connection stops reading, until the reader has caught up.
UNREAD_LIMIT = 4 << 20
_TERMINAL = ("done", "error", "result")


class _Exchange:
    """One id on the wire: events that came and are not yet read, and who waits for them."""

    def __init__(self, link: _Link, ident: int) -> None:
        self.link, self.ident = link, ident
        self.events: list[dict[str, Any]] = []
        self.unread = 0
        self.ended = False
        self.failure: ClientError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: dict[str, Any], nbytes: int) -> None:
        self.events.append(event)
        self.unread += nbytes
        self.ended = self.ended or event.get("event") in _TERMINAL
        self.wake()

    def fail(self, error: ClientError) -> None:
        if not self.ended:
            self.ended, self.failure = True, error
            self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, patience: float | None) -> list[dict[str, Any]]:
        """Every unread event, at least one; empty after the last. Raises the failure once all are read."""
        if not self.events and not self.ended:
            self._waiter = self.link.loop.create_future()
            try:
                async with asyncio.timeout(patience):
                    await self._waiter
            except TimeoutError:
                self.cancel()
                raise TimedOut(f"nothing came from {self.link.path} for {patience:g} s") from None
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                self._waiter = None
        events, self.events, self.unread = self.events, [], 0
        self.link.caught_up(self)
        if not events and self.failure is not None:
            raise self.failure
        return events

    def cancel(self) -> None:
        self.events, self.unread = [], 0
        self.link.caught_up(self)
        if not self.ended:
            self.ended = True
            self.link.send({"op": "cancel", "id": self.ident})
        self.link.exchanges.pop(self.ident, None)
        self.wake()


class _Link(asyncio.Protocol):
    """One connection and the exchanges on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loop = asyncio.get_running_loop()
        self.exchanges: dict[int, _Exchange] = {}
        self.closed = False
        self._ids = itertools.count(1)
        self._reader = FrameReader()
        self._behind: set[_Exchange] = set()
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(PREFACE)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except ProtocolError as error:
            self.end(error)
            return
        for message, nbytes in messages:
            exchange = self.exchanges.get(message.get("id", 0))
            if exchange is None:
                if not message.get("id") and message.get("event") == "error":
                    self.end(from_error(message.get("error") or {}, 0))
                continue
            exchange.push(message, nbytes)
            if exchange.ended:
                del self.exchanges[exchange.ident]
            if exchange.unread > UNREAD_LIMIT:
                self._behind.add(exchange)
                self.transport.pause_reading()

    def caught_up(self, exchange: _Exchange) -> None:
        if exchange in self._behind:
            self._behind.remove(exchange)
            if not self._behind and not self.closed:
                self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f": {exc}" if exc else ""
        self.end(ConnectionLost(f"the connection to {self.path} ended before the answer did{reason}"))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def end(self, error: ClientError) -> None:
        self.closed = True
        self._writable.set()
        self.transport.close()
        exchanges, self.exchanges = list(self.exchanges.values()), {}
        for exchange in exchanges:
            exchange.fail(error)

    def send(self, message: dict[str, Any]) -> None:
        if not self.closed:
            self.transport.write(frame(message))

    async def open(self, message: dict[str, Any]) -> _Exchange:
        await self._writable.wait()
        if self.closed:
            raise ConnectionLost(f"the connection to {self.path} was lost before the request was sent")
        exchange = _Exchange(self, next(self._ids))
        data = frame({**message, "id": exchange.ident})
        self.exchanges[exchange.ident] = exchange
        self.transport.write(data)
        return exchange


class _NativeAnswer:
    def __init__(self, exchange: _Exchange, kind: Kind, timeout: float | None) -> None:
        self._exchange, self._make, self._timeout = exchange, CHUNKS[kind], timeout
        self._failure: ClientError | None = None

    async def batch(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        while not chunks:
            self._check()
            events = await self._exchange.take(self._timeout)
            if not events:
                break
            for event in events:
                self._read(event, chunks)
        return chunks

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _read(self, event: dict[str, Any], chunks: list[Chunk]) -> None:
        match event.get("event"):
            case "delta":
                chunks.append(
                    self._make(
                        choice=event["choice"],
                        text=event["text"],
                        tokens=tuple(event.get("tokens") or ()),
                        logprobs=entries(event.get("logprobs")),
                    )
                )
            case "finish":
                chunks.append(self._make(choice=event["choice"], finish_reason=event["reason"]))
            case "done":
                usage = event.get("usage") or {}
                chunks.append(
                    self._make(
                        choice=-1,
                        usage=Usage(
                            prompt_tokens=usage.get("prompt_tokens", 0),
                            completion_tokens=usage.get("completion_tokens", 0),
                            total_tokens=usage.get("total_tokens", 0),
                        ),
                    )
                )
            case "error":
                self._failure = from_error(event.get("error") or {}, 0)
            case other:
                self._failure = ProtocolError(f"the server sent the event {other!r} in an answer")

    def cancel(self) -> None:
        self._exchange.cancel()


class NativeTransport:
    """The way to a daemon through its Unix socket; connects when first used, and again after a loss.

    ``timeout`` is in seconds without an event of an answer; None waits for ever.
    """

    def __init__(self, path: Path, timeout: float | None = None) -> None:
        self._path, self._timeout = path, timeout
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def _connected(self) -> _Link:
        async with self._connecting:
            if self._closed:
                raise ClientClosed("the client is closed")
            if self._link is None or self._link.closed:
                loop = asyncio.get_running_loop()
                path = self._path
                try:
                    _, self._link = await loop.create_unix_connection(lambda: _Link(path), str(path))
                except OSError as error:
                    raise ServerUnreachable(
                        f"no server answers on the Unix socket {path} ({error.strerror or error}); "
                        "start one with: mstar serve"
                    ) from error
            return self._link

    async def generate(self, kind: Kind, body: dict[str, Any], *, stream: bool) -> _NativeAnswer:
        link = await self._connected()
        if stream:
            body = {**body, "stream": True}
        exchange = await link.open({"op": "generate", "kind": kind, "body": body})
        return _NativeAnswer(exchange, kind, self._timeout)

    async def ask(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        link = await self._connected()
        exchange = await link.open({"op": what, "body": body})
        events = await exchange.take(self._timeout)
        event = events[0] if events else {}
        if event.get("event") == "error":
            raise from_error(event.get("error") or {}, 0)
        if event.get("event") != "result":
            raise ProtocolError(f"the server answered {what!r} with the event {event.get('event')!r}")
        result: dict[str, Any] = event.get("result") or {}
        return result

    async def close(self) -> None:
        self._closed = True
        if self._link is not None:
            self._link.end(ClientClosed("the client was closed before the answer was complete"))
