"""The native protocol, against a server that is told what to do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mstar.client import native
from mstar.client.aio import AsyncClient
from mstar.client.errors import (
    BadRequest,
    ClientClosed,
    ConnectionLost,
    NotReady,
    Overloaded,
    ProtocolError,
    ServerUnreachable,
    TimedOut,
)
from mstar.client.types import ChatChunk, Usage
from tests.client.fakes import USAGE, Peer, answering, native_server
from tests.helpers.waiting import wait_until_async


def silent(peer: Peer, message: dict[str, Any]) -> None:
    """Answer nothing."""


async def test_a_chat_is_collected_choice_by_choice(tmp_path: Path) -> None:
    async with native_server(tmp_path / "s", answering("he", "llo", choices=2)) as server:
        async with AsyncClient(tmp_path / "s") as client:
            result = await client.chat("hi", n=2, temperature=0)
    assert [choice.text for choice in result.choices] == ["hello", "hello"]
    assert result.message == {"role": "assistant", "content": "hello"}
    assert (result.tokens, result.finish_reason) == ((1, 1), "stop")
    assert result.usage == Usage(3, 2, 5)
    (sent,) = server.received
    assert sent["kind"] == "chat"
    assert sent["body"] == {"messages": [{"role": "user", "content": "hi"}], "n": 2, "temperature": 0}


async def test_a_stream_gives_the_chunks_and_then_the_usage(tmp_path: Path) -> None:
    async with native_server(tmp_path / "s", answering("a", "b")), AsyncClient(tmp_path / "s") as client:
        chunks = [chunk async for chunk in await client.chat("hi", stream=True)]
    assert [chunk.text for chunk in chunks] == ["a", "b", "", ""]
    assert all(type(chunk) is ChatChunk for chunk in chunks)
    assert chunks[2].finish_reason == "stop"
    assert (chunks[3].choice, chunks[3].usage) == (-1, Usage(3, 2, 5))


async def test_requests_at_once_share_one_connection(tmp_path: Path) -> None:
    waiting: list[int] = []

    def in_reverse(peer: Peer, message: dict[str, Any]) -> None:
        waiting.append(message["id"])
        if len(waiting) == 3:
            for ident in reversed(waiting):
                peer.send(ident, "delta", choice=0, text=f"<{ident}>", tokens=[], logprobs=None)
                peer.send(ident, "done", usage=USAGE)

    async with native_server(tmp_path / "s", in_reverse) as server, AsyncClient(tmp_path / "s") as client:
        results = await asyncio.gather(*(client.generate(f"{i}") for i in range(3)))
        texts = {message["body"]["prompt"]: f"<{message['id']}>" for message in server.received}
        assert [result.text for result in results] == [texts["0"], texts["1"], texts["2"]]
        assert len(server.peers) == 1


@pytest.mark.parametrize(
    ("status", "kind"), [(400, BadRequest), (413, BadRequest), (429, Overloaded), (503, NotReady)]
)
async def test_an_error_event_becomes_the_exception_of_its_status(
    tmp_path: Path, status: int, kind: type[Exception]
) -> None:
    def refuse(peer: Peer, message: dict[str, Any]) -> None:
        error = {"message": "no", "param": "n", "code": "bad", "status": status}
        peer.send(message["id"], "error", error=error)

    async with native_server(tmp_path / "s", refuse), AsyncClient(tmp_path / "s") as client:
        with pytest.raises(kind, match="no") as caught:
            await client.chat("hi")
    assert (caught.value.param, caught.value.status) == ("n", status)  # type: ignore[attr-defined]


async def test_what_came_before_an_error_is_delivered_first(tmp_path: Path) -> None:
    def break_off(peer: Peer, message: dict[str, Any]) -> None:
        peer.send(message["id"], "delta", choice=0, text="a", tokens=[1], logprobs=None)
        peer.send(message["id"], "error", error={"message": "broke", "status": 500})

    async with native_server(tmp_path / "s", break_off), AsyncClient(tmp_path / "s") as client:
        stream = await client.chat("hi", stream=True)
        assert (await anext(stream)).text == "a"
        with pytest.raises(Exception, match="broke"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_cancel_tells_the_server_which_request(tmp_path: Path) -> None:
    async with native_server(tmp_path / "s", silent) as server, AsyncClient(tmp_path / "s") as client:
        kept, cut = await client.chat("a", stream=True), await client.chat("b", stream=True)
        cut.cancel()
        with pytest.raises(StopAsyncIteration):
            await anext(cut)
        await wait_until_async(lambda: server.ops("cancel"))
        (order,) = server.ops("cancel")
        contents = {m["id"]: m["body"]["messages"][0]["content"] for m in server.ops("generate")}
        assert contents[order["id"]] == "b"
        kept.cancel()


async def test_a_stream_that_is_dropped_ends_its_request(tmp_path: Path) -> None:
    async with native_server(tmp_path / "s", silent) as server, AsyncClient(tmp_path / "s") as client:
        stream = await client.chat("a", stream=True)
        del stream
        await wait_until_async(lambda: server.ops("cancel"))


async def test_a_cancelled_wait_cancels_the_request(tmp_path: Path) -> None:
    async with native_server(tmp_path / "s", silent) as server, AsyncClient(tmp_path / "s") as client:
        task = asyncio.ensure_future(client.chat("a"))
        await wait_until_async(lambda: server.ops("generate"))
        task.cancel()
        await wait_until_async(lambda: server.ops("cancel"))
        assert task.cancelled()


async def test_silence_for_longer_than_the_timeout_cancels(tmp_path: Path) -> None:
    async with (
        native_server(tmp_path / "s", silent) as server,
        AsyncClient(tmp_path / "s", timeout=0.02) as client,
    ):
        with pytest.raises(TimedOut, match=r"for 0\.02 s"):
            await client.chat("a")
        await wait_until_async(lambda: server.ops("cancel"))


async def test_a_lost_connection_ends_every_answer_and_the_next_request_connects_anew(tmp_path: Path) -> None:
    async with native_server(tmp_path / "s", silent) as server, AsyncClient(tmp_path / "s") as client:
        tasks = [asyncio.ensure_future(client.chat("a")) for _ in range(2)]
        await wait_until_async(lambda: len(server.ops("generate")) == 2)
        server.peers[0].transport.abort()
        assert [type(e) for e in await asyncio.gather(*tasks, return_exceptions=True)] == [ConnectionLost] * 2
        server.script = answering("again")
        assert (await client.chat("a")).text == "again"
        assert len(server.peers) == 2


async def test_a_connection_may_be_refused_as_a_whole(tmp_path: Path) -> None:
    def starting(peer: Peer, message: dict[str, Any]) -> None:
        peer.send(0, "error", error={"message": "the server is starting: loading", "status": 503})
        peer.transport.close()

    async with native_server(tmp_path / "s", starting), AsyncClient(tmp_path / "s") as client:
        with pytest.raises(NotReady, match="loading"):
            await client.chat("a")
        assert not await client.ready()


async def test_nobody_at_the_socket_is_told_with_its_path(tmp_path: Path) -> None:
    async with AsyncClient(tmp_path / "none") as client:
        with pytest.raises(ServerUnreachable, match=f"{tmp_path}/none"):
            await client.models()


async def test_a_closed_client_says_so(tmp_path: Path) -> None:
    async with native_server(tmp_path / "s", silent) as server:
        client = AsyncClient(tmp_path / "s")
        task = asyncio.ensure_future(client.chat("a"))
        await wait_until_async(lambda: server.ops("generate"))
        await client.close()
        with pytest.raises(ClientClosed):
            await task
        with pytest.raises(ClientClosed):
            await client.chat("a")


async def test_an_unknown_event_is_a_protocol_error(tmp_path: Path) -> None:
    def odd(peer: Peer, message: dict[str, Any]) -> None:
        peer.send(message["id"], "dance")

    async with native_server(tmp_path / "s", odd), AsyncClient(tmp_path / "s") as client:
        with pytest.raises(ProtocolError, match="'dance'"):
            await client.chat("a")


async def test_a_reader_that_is_behind_stops_the_connection_not_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "UNREAD_LIMIT", 1000)
    text = "x" * 100_000

    async with native_server(tmp_path / "s", answering(*[text] * 100)), AsyncClient(tmp_path / "s") as client:
        stream = await client.chat("a", stream=True)
        exchange = stream._answer._exchange  # type: ignore[attr-defined]
        await wait_until_async(lambda: not exchange.link.transport.is_reading())
        assert exchange.unread < 2_000_000
        assert sum([len(chunk.text) async for chunk in stream]) == 100 * 100_000


async def test_questions_have_results(tmp_path: Path) -> None:
    def script(peer: Peer, message: dict[str, Any]) -> None:
        results = {
            "models": {"data": [{"id": "m", "object": "model", "created": 1, "owned_by": "me"}]},
            "tokenize": {"tokens": [1, 2], "count": 2},
            "detokenize": {"prompt": "hi"},
            "ready": {"ready": True},
            "status": {"daemon": {"pid": 1}},
        }
        peer.send(message["id"], "result", result=results[message["op"]])

    async with native_server(tmp_path / "s", script), AsyncClient(tmp_path / "s") as client:
        assert [model.id for model in await client.models()] == ["m"]
        assert await client.tokenize("hi") == (1, 2)
        assert await client.detokenize((1, 2)) == "hi"
        assert await client.ready()
        assert (await client.status())["daemon"]["pid"] == 1


async def test_what_msgpack_cannot_carry_is_a_bad_request_and_leaves_nothing_open(tmp_path: Path) -> None:
    async with native_server(tmp_path / "s", silent) as server, AsyncClient(tmp_path / "s") as client:
        for prompt in ("half \ud800", [2**70]):
            with pytest.raises(BadRequest, match="cannot be sent"):
                await client.generate(prompt)
        await wait_until_async(lambda: server.peers)
        assert server.received == []
