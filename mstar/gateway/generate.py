"""The two generating routes: a body in, one JSON answer or an event stream out."""

from __future__ import annotations

import asyncio
import secrets
import time

from aiohttp import web
from aiohttp.http import HttpVersion11

from mstar.gateway.auth import request_id
from mstar.gateway.chat import ChatChunks, chat_answer
from mstar.gateway.completions import CompletionChunks, completion_answer
from mstar.gateway.envelope import Envelope
from mstar.gateway.errors import ApiError, internal
from mstar.gateway.intake import Recipe
from mstar.gateway.logprobs import ChatScores, CompletionScores
from mstar.gateway.request import DONE, Render, Request
from mstar.gateway.service import Service
from mstar.gateway.stream import EventStream, Ticker
from mstar.validation.fields import CHAT, COMPLETION

__all__ = ["GenerateRoutes", "read_body"]


class _Whole:
    """A sink that waits for the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.finished: asyncio.Future[None] = loop.create_future()

    def flush(self, request: Request) -> None:
        if request.outcome is not None and not self.finished.done():
            self.finished.set_result(None)


async def read_body(request: web.Request, seconds: float) -> bytes:
    """The whole body. Raises ApiError: 408 where it takes longer than ``seconds``, 400 where its encoding is
    broken; and aiohttp's 413."""
    limit, length = request.client_max_size, request.content_length or 0
    if length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, length)
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {seconds:g} s.", code="timeout") from None
    except web.RequestPayloadError as error:
        message = "The body is not what its Content-Encoding or Transfer-Encoding header says."
        raise ApiError(400, message, code="invalid_body") from error


class GenerateRoutes:
    """Handlers of /v1/chat/completions and /v1/completions."""

    def __init__(self, service: Service, ticker: Ticker) -> None:
        self._service = service
        self._ticker = ticker
        self._chat_scores = ChatScores(service.vocabulary)
        self._completion_scores = CompletionScores(service.vocabulary)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._generate(request, CHAT)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._generate(request, COMPLETION)

    async def _generate(self, request: web.Request, kind: str) -> web.StreamResponse:
        service, seconds = self._service, self._service.tuning.body_seconds
        length = request.content_length
        # A place is scarce and a small body cheap to hold: a client that stalls in one takes no place.
        small = length is not None and length <= service.tuning.unplaced_bytes
        body = await read_body(request, seconds) if small else b""
        number = service.enter()
        try:
            if not small:
                body = await read_body(request, seconds)
            recipe = await service.prepare(kind, body, len(body))
            prefix = "chatcmpl" if kind == CHAT else "cmpl"
            envelope = Envelope(
                f"{prefix}-{secrets.token_hex(12)}", int(time.time()), recipe.model, service.fingerprint
            )
            if recipe.request.stream:
                return await self._streamed(request, number, recipe, envelope)
            return await self._whole(number, recipe, envelope)
        finally:
            service.leave(number)

    def _render(self, recipe: Recipe) -> Render | None:
        if recipe.request.scores < 0:
            return None
        return self._chat_scores.render if recipe.kind == CHAT else self._completion_scores.render

    async def _whole(self, number: int, recipe: Recipe, envelope: Envelope) -> web.Response:
        service = self._service
        sink = _Whole(service.ctx.loop)
        live = service.submit(number, recipe, sink, render=self._render(recipe))
        try:
            await sink.finished
        finally:
            service.cancel(live)
        if live.outcome != DONE:
            raise live.failure or internal("The request was ended.")
        scored = recipe.request.scores >= 0
        answer = chat_answer if recipe.kind == CHAT else completion_answer
        return web.Response(body=answer(envelope, live, scored=scored), content_type="application/json")

    async def _streamed(
        self, request: web.Request, number: int, recipe: Recipe, envelope: Envelope
    ) -> web.StreamResponse:
        service = self._service
        usage = recipe.request.include_usage
        chunks = (ChatChunks if recipe.kind == CHAT else CompletionChunks)(envelope, usage=usage)
        stream = EventStream(service.ctx.loop, chunks, service.tuning, self._cut)
        live = service.submit(number, recipe, stream, render=self._render(recipe))
        stream.request = live
        self._ticker.add(stream)
        try:
            await stream.started
            if live.failure is not None:
                raise live.failure
            response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
            response.content_type, response.charset = "text/event-stream", "utf-8"
            response.headers["x-request-id"] = request_id(request)
            chunked = request.version >= HttpVersion11
            if chunked:
                response.enable_chunked_encoding()
            await response.prepare(request)
            transport = request.transport
            if transport is None:
                raise ConnectionResetError("the client went away")
            stream.open(transport, chunked=chunked)
            await stream.finished
            return response
        finally:
            self._ticker.discard(stream)
            service.cancel(live)

    def _cut(self, request: Request) -> None:
        self._service.slow_readers += 1
        self._service.cancel(request)
