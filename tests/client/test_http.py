"""The client over HTTP, against a small server of OpenAI's protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from mstar.client.aio import AsyncClient
from mstar.client.errors import (
    BadRequest,
    ConnectionLost,
    Forbidden,
    NotReady,
    Overloaded,
    ServerUnreachable,
    TimedOut,
)
from mstar.client.types import TopLogprob, Usage

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(path: str, handler: Handler, **options: Any) -> AsyncIterator[AsyncClient]:
    app = web.Application()
    app.router.add_route("*", path, handler)
    app.router.add_get("/v1/models", replying({"data": [{"id": "only"}]}))
    async with (
        TestServer(app) as server,
        AsyncClient(f"http://127.0.0.1:{server.port}/v1", **options) as client,
    ):
        yield client


def replying(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(body, status=status, headers=headers)

    return handler


def events(*data: Any, end: bool = True, seen: list[Any] | None = None) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append((await request.json(), dict(request.headers)))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in (*(json.dumps(d) for d in data), *(["[DONE]"] if end else [])):
            await response.write(f": ping\n\ndata: {piece}\n\n".encode())
        return response

    return handler


def delta(text: str | None, reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason, **fields}]}


async def test_a_chat_is_streamed_and_collected_with_its_usage() -> None:
    seen: list[Any] = []
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
    handler = events(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        delta("a"),
        delta("b", "length"),
        usage,
        seen=seen,
    )
    async with serving("/v1/chat/completions", handler, api_key="secret") as client:
        result = await client.chat([{"role": "user", "content": "hi"}], max_tokens=2)
    assert (result.text, result.finish_reason, result.usage) == ("ab", "length", Usage(1, 2, 3))
    body, headers = seen[0]
    assert (body["model"], body["stream_options"]) == ("only", {"include_usage": True})
    assert headers["Authorization"] == "Bearer secret"


async def test_completions_have_text_and_columns_of_logprobs() -> None:
    scores = {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.0}],
        "text_offset": [0],
    }
    handler = events({"choices": [{"index": 0, "text": "a", "logprobs": scores, "finish_reason": "stop"}]})
    async with serving("/v1/completions", handler) as client:
        result = await client.generate("x", model="m")
    (entry,) = result.choices[0].logprobs
    assert (entry.token, entry.logprob) == ("a", -0.5)
    assert entry.top_logprobs == (TopLogprob("a", -0.5), TopLogprob("b", -1.0))


async def test_chat_logprobs_are_read() -> None:
    content = [
        {
            "token": "a",
            "logprob": -1.0,
            "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -2, "bytes": None}],
        }
    ]
    handler = events(delta("a", "stop", logprobs={"content": content}))
    async with serving("/v1/chat/completions", handler) as client:
        result = await client.chat("x")
    assert result.choices[0].logprobs[0].top_logprobs[0].token == "b"
    assert result.choices[0].logprobs[0].bytes == (97,)


async def test_statuses_become_exceptions_with_retry_after() -> None:
    error = {"error": {"message": "busy", "type": "x", "param": None, "code": None}}
    async with serving("/v1/chat/completions", replying(error, 429, {"Retry-After": "7"})) as client:
        with pytest.raises(Overloaded, match="busy") as caught:
            await client.chat("x")
    assert caught.value.retry_after == 7


@pytest.mark.parametrize(("status", "kind"), [(400, BadRequest), (401, Forbidden), (503, NotReady)])
async def test_a_body_that_is_no_json_is_the_message(status: int, kind: type[Exception]) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status, text="a proxy says no")

    async with serving("/v1/chat/completions", handler) as client:
        with pytest.raises(kind, match="a proxy says no"):
            await client.chat("x", model="m")


async def test_an_error_event_inside_a_stream_raises_after_what_came() -> None:
    handler = events(delta("a"), {"error": {"message": "broke", "code": 500}}, end=False)
    async with serving("/v1/chat/completions", handler) as client:
        stream = await client.chat("x", stream=True)
        assert (await anext(stream)).text == "a"
        with pytest.raises(Exception, match="broke"):
            await anext(stream)


async def test_an_end_without_done_is_a_lost_connection() -> None:
    async with serving("/v1/chat/completions", events(delta("a"), end=False)) as client:
        with pytest.raises(ConnectionLost):
            await client.chat("x")


async def test_closing_a_stream_closes_its_connection_and_no_other() -> None:
    gone = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            await response.write(f"data: {json.dumps(delta('a'))}\n\n".encode())
            await asyncio.Event().wait()
        finally:
            gone.set()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", endless)
    async with TestServer(app, handler_cancellation=True) as server:
        async with AsyncClient(f"http://127.0.0.1:{server.port}") as client:
            async with await client.chat("x", stream=True, model="m") as stream:
                assert (await anext(stream)).text == "a"
            async with asyncio.timeout(5):
                await gone.wait()


async def test_silence_for_longer_than_the_timeout_is_told() -> None:
    async def never(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with serving("/v1/chat/completions", never, timeout=0.05) as client:
        with pytest.raises(TimedOut):
            await client.chat("x", model="m")


async def test_nobody_at_the_port_is_told_with_its_address() -> None:
    async with AsyncClient("http://127.0.0.1:1") as client:
        with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:1"):
            await client.models()


async def test_what_json_cannot_carry_is_a_bad_request_and_nothing_is_sent() -> None:
    async with serving("/v1/completions", events(seen=[])) as client:
        for prompt in ("half \ud800", [object()]):
            with pytest.raises(BadRequest, match="cannot be sent"):
                await client.generate(prompt)  # type: ignore[arg-type]
