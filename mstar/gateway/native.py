"""The native protocol's server: many requests on one connection, each ended by exactly one event.

Frames are a u32 little-endian length and a msgpack map. What streams gain within one turn of the loop leaves
in one write; while the socket is behind, deltas merge in their requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import msgspec

from mstar.gateway.errors import ApiError, as_api_error, internal
from mstar.gateway.intake import Recipe
from mstar.gateway.logprobs import NativeScores
from mstar.gateway.native_stream import NativeStream, cancelled, error_event, held
from mstar.gateway.service import Service
from mstar.gateway.stream import Ticker
from mstar.validation.body import PIECE
from mstar.validation.errors import RequestInvalid
from mstar.validation.fields import CHAT, COMPLETION
from mstar.validation.frame import decode_frame

__all__ = ["NativeConnection", "Question"]

_log = logging.getLogger(__name__)

Question = Callable[[Mapping[str, Any], int], Awaitable[Mapping[str, Any]]]
"""Answers an op that is no generation: (body, its size in bytes) -> result. Raises ApiError."""

LENGTH = 4
_encode = msgspec.msgpack.Encoder().encode


class _Message(NamedTuple):
    """A client's frame, and its size in bytes."""

    op: str
    id: int
    kind: str
    body: Any
    size: int

    @classmethod
    def read(cls, frame: bytes) -> _Message:
        """Decode a frame. Raises RequestInvalid where it says not even whom to answer."""
        found = decode_frame(frame)
        op, ident, kind = found.get("op"), found.get("id"), found.get("kind", "")
        if not isinstance(op, str) or type(ident) is not int or ident < 0 or not isinstance(kind, str):
            raise RequestInvalid(
                "A frame needs `op`, a string, and `id`, a positive integer.", "id", "invalid_frame"
            )
        return cls(op, ident, kind, found.get("body", {}), len(frame))


class NativeConnection(asyncio.Protocol):
    """One connection. ``questions`` answer the ops beside "generate" and "cancel"."""

    def __init__(
        self, service: Service, questions: Mapping[str, Question], ticker: Ticker, *, max_frame: int
    ) -> None:
        self._service = service
        self._questions = questions
        self._ticker = ticker
        self._max_frame = max_frame
        self._scores = NativeScores(service.vocabulary)
        self._buffer = bytearray()
        self._open: dict[int, NativeStream] = {}
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._behind_since: float | None = None
        self._closing = False
        self._decoding: asyncio.Task[None] | None = None
        self.late: dict[NativeStream, None] = {}

    # ---- the transport's side ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        transport = cast("asyncio.Transport", transport)
        tuning = self._service.tuning
        transport.set_write_buffer_limits(high=tuning.write_high, low=tuning.write_low)
        self._transport = transport
        self._service.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closing = True
        self._ticker.discard(self)
        self._service.connections.discard(self)
        if self._decoding is not None:
            self._decoding.cancel()
        self.late.clear()
        for stream in list(self._open.values()):
            self._drop(stream)
        self._open.clear()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._cut()

    def _cut(self) -> None:
        """Take the whole frames of the buffer; while a thread decodes a large one, no further."""
        buffer = self._buffer
        start = 0
        while len(buffer) - start >= LENGTH and not self._closing and self._decoding is None:
            size = int.from_bytes(buffer[start : start + LENGTH], "little")
            if size > self._max_frame:
                self._break(
                    ApiError(
                        413,
                        f"A frame of {size} bytes is too large; at most {self._max_frame} are allowed.",
                        code="request_too_large",
                    )
                )
                return
            end = start + LENGTH + size
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                frame = bytes(view[start + LENGTH : end])
            start = end
            self._read(frame)
        if start:
            del buffer[:start]

    def pause_writing(self) -> None:
        self._behind_since = self._service.ctx.loop.time()
        self._ticker.add(self)

    def resume_writing(self) -> None:
        self._behind_since = None
        self._ticker.discard(self)
        self._read_on()
        late, self.late = self.late, {}
        for stream in late:
            if stream.request is not None:
                stream.flush(stream.request)

    def tick(self, now: float) -> None:
        """Cut a connection that stays behind, or for which too much was merged."""
        if self._behind_since is None or self._transport is None:
            return
        tuning = self._service.tuning
        merged = sum(held(stream.request) for stream in self.late if stream.request is not None)
        if now - self._behind_since > tuning.slow_seconds or merged > tuning.pending_bytes:
            _log.info("a native connection reads too slowly and is cut")
            self._service.slow_readers += 1
            self._transport.abort()

    @property
    def behind(self) -> bool:
        """Whether the socket has more unsent bytes than it should."""
        return self._behind_since is not None

    @property
    def idle(self) -> bool:
        """Whether nothing is open and nothing waits to be written."""
        return not self._open and not self._out

    def close(self) -> None:
        """Close once everything is written."""
        self._closing = True
        self._write_out()
        if self._transport is not None:
            self._transport.close()

    # ---- frames ------------------------------------------------------------------------------

    def owns(self, stream: NativeStream) -> bool:
        """Whether the id of ``stream`` has had no terminal event yet."""
        return self._open.get(stream.ident) is stream

    def send(self, event: dict[str, Any]) -> None:
        """Queue one event; all of this turn of the loop leave together."""
        frame = _encode(event)
        if not self._out:
            self._service.ctx.loop.call_soon(self._write_out)
        self._out.append(len(frame).to_bytes(LENGTH, "little"))
        self._out.append(frame)

    def end(self, ident: int, event: dict[str, Any]) -> None:
        """Queue the one terminal event of an id."""
        if ident in self._open:
            self.send({"id": ident, **event})
            del self._open[ident]

    def _write_out(self) -> None:
        out, self._out = self._out, []
        transport = self._transport
        if out and transport is not None:
            transport.write(b"".join(out))
            if transport.get_write_buffer_size() > self._service.tuning.pending_bytes:
                transport.pause_reading()  # who does not read the answers asks no more questions

    def _break(self, error: ApiError) -> None:
        """The stream of frames cannot be followed any more: say why, and close."""
        self.send({"id": 0, **error_event(error)})
        self.close()

    def _read_on(self) -> None:
        transport = self._transport
        if transport is None or self._closing or self._decoding is not None:
            return
        if transport.get_write_buffer_size() <= self._service.tuning.pending_bytes:
            transport.resume_reading()

    def _read(self, frame: bytes) -> None:
        if len(frame) > PIECE:
            if self._transport is not None:
                self._transport.pause_reading()
            self._decoding = self._service.ctx.loop.create_task(self._read_large(frame))
            return
        try:
            self._take(_Message.read(frame))
        except RequestInvalid as error:
            self._break(as_api_error(error))

    async def _read_large(self, frame: bytes) -> None:
        try:
            message = await self._service.pool.run(_Message.read, frame, bounded=False)
        except RequestInvalid as error:
            self._break(as_api_error(error))
            return
        self._decoding = None
        self._take(message)
        self._read_on()
        self._cut()

    def _take(self, message: _Message) -> None:
        if message.op == "cancel":
            stream = self._open.get(message.id)
            if stream is not None:
                self._cancel(stream)
            return
        if message.id in self._open or message.id == 0:
            self._break(
                ApiError(400, f"The id {message.id} is in use or 0; take another one.", code="invalid_id")
            )
            return
        stream = self._open[message.id] = NativeStream(self, message.id)
        if len(self._open) > self._service.tuning.frames_per_connection:
            self._fail(stream, ApiError(429, "Too many requests are open on this connection.", retry_after=1))
        elif not isinstance(message.body, dict) or not all(isinstance(name, str) for name in message.body):
            self._fail(stream, ApiError(400, "`body` must be a map of names.", param="body"))
        elif message.op == "generate":
            self._generate(stream, message)
        elif message.op in self._questions:
            stream.task = self._service.ctx.loop.create_task(self._ask(stream, message))
        else:
            known = ", ".join(["generate", "cancel", *self._questions])
            self._fail(
                stream, ApiError(400, f"Unknown op {message.op[:80]!r}; known are {known}.", param="op")
            )

    def _generate(self, stream: NativeStream, message: _Message) -> None:
        """Small requests are admitted at once; large ones are worked on by a thread first."""
        service = self._service
        if message.size > service.tuning.inline_bytes:
            stream.task = service.ctx.loop.create_task(self._generate_large(stream, message))
            return
        with self._answering(stream):
            _check_kind(message.kind)
            number = service.enter()
            try:
                recipe = service.intake.recipe(message.kind, message.body, model_required=False)
                self._submit(stream, number, recipe)
            finally:
                service.leave(number)

    async def _generate_large(self, stream: NativeStream, message: _Message) -> None:
        service = self._service
        with self._answering(stream):
            _check_kind(message.kind)
            number = service.enter()
            try:
                recipe = await service.prepare(message.kind, message.body, message.size, model_required=False)
                self._submit(stream, number, recipe)
            finally:
                service.leave(number)

    def _submit(self, stream: NativeStream, number: int, recipe: Recipe) -> None:
        stream.streamed = recipe.request.stream
        render = self._scores.render if recipe.request.scores >= 0 else None
        stream.request = self._service.submit(number, recipe, stream, native=True, render=render)

    async def _ask(self, stream: NativeStream, message: _Message) -> None:
        with self._answering(stream):
            result = await self._questions[message.op](message.body, message.size)
            self.end(stream.ident, {"event": "result", "result": result})

    @contextmanager
    def _answering(self, stream: NativeStream) -> Iterator[None]:
        """Turn what goes wrong into the terminal event of ``stream``."""
        try:
            yield
        except RequestInvalid as error:
            self._fail(stream, as_api_error(error))
        except ApiError as error:
            self._fail(stream, error)
        except Exception:  # noqa: BLE001 - a handler's mistake is an error event, logged with its traceback
            _log.exception("a native request failed")
            self._fail(stream, internal("The server failed on this request."))
        finally:
            stream.task = None

    def _fail(self, stream: NativeStream, error: ApiError) -> None:
        self._service.refused(error.status)
        self.end(stream.ident, error_event(error))

    def _cancel(self, stream: NativeStream) -> None:
        self._drop(stream)
        self.end(stream.ident, error_event(cancelled()))

    def _drop(self, stream: NativeStream) -> None:
        if stream.task is not None:
            stream.task.cancel()
        if stream.request is not None:
            self._service.cancel(stream.request)


def _check_kind(kind: str) -> None:
    if kind not in (CHAT, COMPLETION):
        raise RequestInvalid(
            f"`kind` must be 'chat' or 'completion', not {kind[:80]!r}.", "kind", "invalid_value"
        )
