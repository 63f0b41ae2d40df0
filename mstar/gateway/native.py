"""The native protocol's server: many requests on one connection, each ended by exactly one event.

Frames are a u32 little-endian length and a msgpack map. What streams gain within one turn of the loop leaves
in one write; while the socket is behind, deltas merge in their requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec

from mstar.gateway.book import DONE, Request
from mstar.gateway.errors import ApiError, as_api_error, internal
from mstar.gateway.logprobs import NativeScores
from mstar.gateway.service import Service
from mstar.gateway.stream import Ticker
from mstar.validation.errors import RequestInvalid
from mstar.validation.fields import CHAT, COMPLETION

__all__ = ["NativeConnection", "Question"]

_log = logging.getLogger(__name__)

Question = Callable[[Mapping[str, Any], int], Awaitable[Mapping[str, Any]]]
"""Answers an op that is no generation: (body, its size in bytes) -> result. Raises ApiError."""

LENGTH = 4
_encode = msgspec.msgpack.Encoder().encode


class _Message(msgspec.Struct):
    """A client's frame; the body stays undecoded until something is to be done with it."""

    op: str
    id: int
    kind: str = ""
    body: msgspec.Raw = msgspec.Raw(b"\x80")


_decoder = msgspec.msgpack.Decoder(_Message)


class _Stream:
    """A sink that writes frames of one id. Without ``stream`` it speaks at the end only."""

    def __init__(self, connection: NativeConnection, ident: int) -> None:
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
            connection.end(self.ident, error_event(request.failure or _cancelled()))


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
        self._open: dict[int, _Stream] = {}
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._behind_since: float | None = None
        self._closing = False
        self.late: dict[_Stream, None] = {}

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
        self.late.clear()
        for stream in list(self._open.values()):
            self._drop(stream)
        self._open.clear()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= LENGTH and not self._closing:
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
            frame = bytes(memoryview(buffer)[start + LENGTH : end])
            start = end
            self._take(frame)
        if start:
            del buffer[:start]

    def pause_writing(self) -> None:
        self._behind_since = self._service.ctx.loop.time()
        self._ticker.add(self)

    def resume_writing(self) -> None:
        self._behind_since = None
        self._ticker.discard(self)
        late, self.late = self.late, {}
        for stream in late:
            if stream.request is not None:
                stream.flush(stream.request)

    def tick(self, now: float) -> None:
        """Cut a connection that stays behind, or for which too much was merged."""
        if self._behind_since is None or self._transport is None:
            return
        tuning = self._service.tuning
        held = sum(_held(stream.request) for stream in self.late if stream.request is not None)
        if now - self._behind_since > tuning.slow_seconds or held > tuning.pending_bytes:
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

    def owns(self, stream: _Stream) -> bool:
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
        if out and self._transport is not None:
            self._transport.write(b"".join(out))

    def _break(self, error: ApiError) -> None:
        """The stream of frames cannot be followed any more: say why, and close."""
        self.send({"id": 0, **error_event(error)})
        self.close()

    def _take(self, frame: bytes) -> None:
        try:
            message = _decoder.decode(frame)
        except msgspec.DecodeError as error:
            self._break(ApiError(400, f"A frame is no request: {error}.", code="invalid_frame"))
            return
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
        stream = self._open[message.id] = _Stream(self, message.id)
        if len(self._open) > self._service.tuning.frames_per_connection:
            self._fail(stream, ApiError(429, "Too many requests are open on this connection.", retry_after=1))
        elif message.op == "generate":
            self._generate(stream, message)
        elif message.op in self._questions:
            stream.task = self._service.ctx.loop.create_task(self._ask(stream, message))
        else:
            known = ", ".join(["generate", "cancel", *self._questions])
            self._fail(
                stream, ApiError(400, f"Unknown op {message.op[:80]!r}; known are {known}.", param="op")
            )

    def _generate(self, stream: _Stream, message: _Message) -> None:
        """Small requests are admitted at once; large ones are worked on by a thread first."""
        service = self._service
        try:
            if message.kind not in (CHAT, COMPLETION):
                raise ApiError(
                    400, f"`kind` must be 'chat' or 'completion', not {message.kind[:80]!r}.", param="kind"
                )
            number = service.enter()
        except ApiError as error:
            self._fail(stream, error)
            return
        if len(message.body) <= service.tuning.inline_bytes:
            try:
                recipe = service.intake.recipe(message.kind, _body(message.body), model_required=False)
                self._submit(stream, number, recipe)
            except RequestInvalid as error:
                self._fail(stream, as_api_error(error))
            except ApiError as error:
                self._fail(stream, error)
            finally:
                service.leave(number)
        else:
            stream.task = service.ctx.loop.create_task(self._prepare(stream, number, message))

    async def _prepare(self, stream: _Stream, number: int, message: _Message) -> None:
        service = self._service

        def work() -> Any:
            return service.intake.recipe(message.kind, _body(message.body), model_required=False)

        try:
            self._submit(stream, number, await service.work(len(message.body), work))
        except ApiError as error:
            self._fail(stream, error)
        finally:
            stream.task = None
            service.leave(number)

    def _submit(self, stream: _Stream, number: int, recipe: Any) -> None:
        stream.streamed = recipe.request.stream
        render = self._scores.render if recipe.request.scores >= 0 else None
        stream.request = self._service.submit(number, recipe, stream, native=True, render=render)

    async def _ask(self, stream: _Stream, message: _Message) -> None:
        try:
            body = _body(message.body) if len(message.body) <= self._max_frame else {}
            result = await self._questions[message.op](body, len(message.body))
            self.end(stream.ident, {"event": "result", "result": result})
        except RequestInvalid as error:
            self._fail(stream, as_api_error(error))
        except ApiError as error:
            self._fail(stream, error)
        except Exception:  # noqa: BLE001 - a handler's mistake is a 500, logged with its traceback
            _log.exception("the native op %s failed", message.op)
            self._fail(stream, internal("The server failed on this request."))
        finally:
            stream.task = None

    def _fail(self, stream: _Stream, error: ApiError) -> None:
        self._service.refused(error.status)
        self.end(stream.ident, error_event(error))

    def _cancel(self, stream: _Stream) -> None:
        self._drop(stream)
        self.end(stream.ident, error_event(_cancelled()))

    def _drop(self, stream: _Stream) -> None:
        if stream.task is not None:
            stream.task.cancel()
        if stream.request is not None:
            self._service.cancel(stream.request)


def _body(raw: msgspec.Raw) -> dict[str, Any]:
    try:
        body = msgspec.msgpack.decode(raw)
    except msgspec.DecodeError as error:
        raise RequestInvalid(f"The body is not valid msgpack: {error}.", "body", "invalid_frame") from error
    except RecursionError as error:
        raise RequestInvalid("The body nests too deeply.", "body", "invalid_frame") from error
    if not isinstance(body, dict) or not all(isinstance(name, str) for name in body):
        raise RequestInvalid("`body` must be a map of names.", "body", "invalid_frame")
    return body


def _cancelled() -> ApiError:
    return ApiError(499, "The request was cancelled by its client.", code="cancelled")


def error_event(error: ApiError) -> dict[str, Any]:
    """The terminal event of a request that failed."""
    found = {**error.object(), "status": error.status}
    if error.retry_after is not None:
        found["retry_after"] = error.retry_after
    return {"event": "error", "error": found}


def _held(request: Request) -> int:
    """Roughly the bytes that wait in a request."""
    return sum(
        sum(map(len, choice.texts))
        + 8 * len(choice.tokens)
        + 100 * len(choice.scores) * (1 + max(choice.top, 0))
        for choice in request.choices
    )
