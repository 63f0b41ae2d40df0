"""The same gateway on uvloop, whose transports differ in type and in when they write."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import MODEL, Gateway, serving
from tests.gateway.raw import NativeClient, RawClient, events, http_post
from tests.gateway.test_disconnects import WAYS, dropped, leave
from tests.gateway.test_streams import SMALL, said, unchunked
from tests.helpers.waiting import wait_until_async

uvloop = pytest.importorskip("uvloop")

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 20, "stream": True}
Scenario = Callable[[Gateway], Awaitable[None]]


def on_uvloop(directory: Path, run_dir: Path, scenario: Scenario, **options: Any) -> None:
    async def main() -> None:
        async with serving(directory, run_dir, **options) as gateway:
            await scenario(gateway)

    uvloop.run(main())


@pytest.mark.parametrize("target", ["port", "uds"])
def test_a_stream_is_answered(tiny_model_dir: Path, tmp_path: Path, target: str) -> None:
    async def scenario(gateway: Gateway) -> None:
        client = await RawClient.connect(getattr(gateway, target))
        await client.send(http_post("/v1/completions", BODY))
        *chunks, done = events(unchunked(await client.until(b"0\r\n\r\n")))
        client.close()
        assert done == "[DONE]"
        assert "".join(map(said, chunks)).startswith("The hello of the world")

    on_uvloop(tiny_model_dir, tmp_path, scenario)


def test_the_native_protocol_is_answered(tiny_model_dir: Path, tmp_path: Path) -> None:
    async def scenario(gateway: Gateway) -> None:
        client = await NativeClient.open(gateway.uds)
        await client.ask(op="generate", id=1, kind="completion", body={**BODY, "user": "x" * 100_000})
        found = await client.until_end(1)
        client.close()
        assert found[-1]["usage"]["completion_tokens"] == 20

    on_uvloop(tiny_model_dir, tmp_path, scenario)


@pytest.mark.behaviour("F-17")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("target", ["port", "uds"])
def test_rows_are_dropped_when_the_client_goes(
    tiny_model_dir: Path, tmp_path: Path, how: str, target: str
) -> None:
    async def scenario(gateway: Gateway) -> None:
        gateway.rank.credit = 2
        client = await RawClient.connect(getattr(gateway, target))
        await client.send(http_post("/v1/completions", {**BODY, "n": 3}))
        await client.until(b"data: ")
        leave(client, how)
        await dropped(gateway)
        client.close()

    on_uvloop(tiny_model_dir, tmp_path, scenario)


@pytest.mark.behaviour("F-29")
def test_deltas_merge_while_the_socket_is_behind(tiny_model_dir: Path, tmp_path: Path) -> None:
    async def scenario(gateway: Gateway) -> None:
        client = await RawClient.connect(gateway.port, receive_buffer=4096)
        await client.send(http_post("/v1/completions", {**BODY, "max_tokens": 200, "n": 20}))
        await wait_until_async(lambda: gateway.rank.admitted and not gateway.rank.rows, 10)
        chunks = events(unchunked(await client.until(b"[DONE]\n\n")))
        client.close()
        assert len(chunks) < 200 * 20 / 2

    on_uvloop(
        tiny_model_dir, tmp_path, scenario, tuning=SMALL._replace(pending_bytes=1 << 30), send_buffer=8192
    )


@pytest.mark.behaviour("F-29")
def test_a_reader_that_stays_behind_is_cut(tiny_model_dir: Path, tmp_path: Path) -> None:
    async def scenario(gateway: Gateway) -> None:
        client = await RawClient.connect(gateway.port, receive_buffer=4096)
        await client.send(http_post("/v1/completions", {**BODY, "max_tokens": 100, "n": 64, "logprobs": 5}))
        await wait_until_async(lambda: gateway.service.slow_readers == 1, 15)
        await wait_until_async(lambda: gateway.service.book.live == gateway.service.conductor.live == 0)
        client.close()

    tuning = SMALL._replace(slow_seconds=0.1)
    on_uvloop(tiny_model_dir, tmp_path, scenario, tuning=tuning, send_buffer=8192)


def test_the_socket_survives_its_server(tiny_model_dir: Path, tmp_path: Path) -> None:
    async def scenario(gateway: Gateway) -> None:
        pass

    on_uvloop(tiny_model_dir, tmp_path, scenario)
    assert (tmp_path / "m.sock").exists()
