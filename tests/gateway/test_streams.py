"""Event streams byte by byte: order, pings, failures after the first byte, and readers that do not read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mstar.gateway.tuning import Tuning
from tests.gateway.harness import MODEL, TEXT, Gateway, saying, serving
from tests.gateway.raw import RawClient, events, http_post
from tests.helpers.waiting import wait_until_async

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
COMPLETION = {"model": MODEL, "prompt": "hello", "stream": True}
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]


def said(chunk: Any) -> str:
    choice = chunk["choices"][0]
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


@pytest.mark.behaviour("F-28")
@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_is_chunks_then_done(gateway: Gateway, path: str, body: Any, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    async with gateway.http() as client:
        response = await client.post(path, json={**body, "max_tokens": 4, **options})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response.content)
    assert done == "[DONE]"
    assert all(("usage" in chunk) == usage for chunk in chunks)
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
        assert all(chunk["usage"] is None for chunk in chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk["system_fingerprint"].startswith("fp_") for chunk in chunks)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_both_versions_of_http_are_streamed_to_their_end(gateway: Gateway, version: str) -> None:
    client = await RawClient.connect(gateway.port)
    headers = ("Connection: close",)
    await client.send(
        http_post("/v1/completions", {**COMPLETION, "max_tokens": 3}, version=version, headers=headers)
    )
    head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    client.close()
    assert (b"chunked" in head) == (version == "1.1")
    assert body.endswith(b"0\r\n\r\n" if version == "1.1" else b"data: [DONE]\n\n")


@pytest.mark.behaviour("F-23")
async def test_no_event_of_a_stream_holds_a_broken_character_or_a_line_end(
    tiny_model_dir: Path, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    text = "caf\u00e9 \U0001f600\u2028 \u4f60\u597d\x85 end\n\n"
    async with (
        serving(tiny_model_dir, tmp_path, script=saying(tiny_tokenizer, text)) as gateway,
        gateway.http() as client,
    ):
        response = await client.post("/v1/chat/completions", json=CHAT)
    lines = [line for line in response.content.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    *chunks, _ = events(response.content)
    assert "".join(map(said, chunks)) == text
    assert not any("\ufffd" in said(chunk) for chunk in chunks)


async def test_a_long_prefill_is_bridged_by_comments(tiny_model_dir: Path, tmp_path: Path) -> None:
    tuning = Tuning(ping_seconds=0.02, tick_seconds=0.005)
    async with serving(tiny_model_dir, tmp_path, tuning=tuning) as gateway:
        gateway.rank.credit = 0
        client = await RawClient.connect(gateway.port)
        await client.send(http_post("/v1/chat/completions", {**CHAT, "max_tokens": 2}))
        head = await client.until(b": ping\n\n")
        head += await client.until(b": ping\n\n")
        gateway.rank.grant(None)
        body = await client.until(b"[DONE]\n\n")
        client.close()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"data:" not in head
    assert b'"role":"assistant"' in body


@pytest.mark.behaviour("F-28")
@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_failure_before_the_first_byte_is_a_status(gateway: Gateway, path: str, body: Any) -> None:
    gateway.rank.credit = 0
    async with gateway.http() as client:
        asked = asyncio.create_task(client.post(path, json=body))
        await wait_until_async(lambda: gateway.rank.rows)
        gateway.rank.fail_row(next(iter(gateway.rank.rows)), "no pages are left", 503)
        response = await asked
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no pages are left"


@pytest.mark.behaviour("F-28")
@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("fault", ["row", "death", "gap"])
async def test_a_failure_after_the_first_byte_is_one_error_event_and_the_end(
    gateway: Gateway, path: str, body: Any, fault: str
) -> None:
    rank = gateway.rank
    rank.credit = 2
    client = await RawClient.connect(gateway.port)
    await client.send(http_post(path, {**body, "n": 2}, headers=("Connection: close",)))
    head = await client.until(b"data: ")
    await wait_until_async(lambda: rank.credit == 0)
    if fault == "row":
        rank.fail_row(next(iter(rank.rows)), "the step failed")
    elif fault == "death":
        rank.die("rank/0 was killed by SIGKILL")
    else:
        next(rank.rows[next(iter(rank.rows))].places)
        rank.grant(1)
    rest = await client.rest()
    client.close()
    found = [
        block
        for block in (head + rest).decode().replace("\r\n", "\n").split("\n")
        if block.startswith("data: ")
    ]
    errors = [block for block in found if '"error"' in block]
    assert found[-1:] == errors
    assert "[DONE]" not in rest.decode()
    assert rest.endswith(b"0\r\n\r\n")
    assert gateway.service.statistics().book.outcomes == {"failed": 1}


class Stubborn:
    """A client that asks and does not read."""

    def __init__(self, client: RawClient) -> None:
        self.client = client

    @classmethod
    async def ask(cls, gateway: Gateway, body: Any) -> Stubborn:
        client = await RawClient.connect(gateway.port, receive_buffer=4096)
        await client.send(http_post("/v1/completions", {**COMPLETION, **body}))
        return cls(client)


SMALL = Tuning(write_high=4096, write_low=1024, pending_bytes=20_000, slow_seconds=60, tick_seconds=0.01)
MANY = {"n": 64, "logprobs": 5}


@pytest.mark.behaviour("F-29")
async def test_deltas_merge_while_the_socket_is_behind_and_nothing_is_lost(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    tuning = SMALL._replace(pending_bytes=1 << 30)
    async with serving(tiny_model_dir, tmp_path, tuning=tuning, send_buffer=8192) as gateway:
        stubborn = await Stubborn.ask(gateway, {"max_tokens": 200, "n": 20})
        await wait_until_async(
            lambda: gateway.rank.admitted and not gateway.rank.rows, 10, what="all rows to end"
        )
        body = await stubborn.client.until(b"[DONE]\n\n")
        stubborn.client.close()
        await wait_until_async(lambda: gateway.service.responding == 0)
    chunks = [chunk for chunk in events(unchunked(body)) if chunk != "[DONE]"]
    tokens = gateway.service.intake.tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    expected = gateway.service.intake.tokenizer.decode((tokens * 100)[:200], skip_special_tokens=True)
    for index in range(20):
        assert "".join(said(chunk) for chunk in chunks if chunk["choices"][0]["index"] == index) == expected
    assert len(chunks) < 200 * 20 / 2


@pytest.mark.behaviour("F-29")
@pytest.mark.parametrize("bound", ["time", "bytes"])
async def test_a_reader_that_stays_behind_is_cut_and_its_rows_dropped(
    tiny_model_dir: Path, tmp_path: Path, bound: str
) -> None:
    tuning = SMALL._replace(slow_seconds=0.1, pending_bytes=1 << 30) if bound == "time" else SMALL
    async with serving(tiny_model_dir, tmp_path, tuning=tuning, send_buffer=8192) as gateway:
        stubborn = await Stubborn.ask(gateway, {**MANY, "max_tokens": 100})
        await wait_until_async(lambda: gateway.service.slow_readers == 1, 15, what="the reader to be cut")
        await wait_until_async(lambda: gateway.service.book.live == gateway.service.conductor.live == 0)
        stubborn.client.close()


@pytest.mark.behaviour("F-29")
async def test_a_whole_answer_that_nobody_reads_does_not_wait_for_ever(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    tuning = SMALL._replace(slow_seconds=0.1)
    async with serving(tiny_model_dir, tmp_path, tuning=tuning, send_buffer=8192) as gateway:
        stubborn = await Stubborn.ask(gateway, {"max_tokens": 50, "n": 64, "logprobs": 5, "stream": False})
        await wait_until_async(lambda: gateway.rank.admitted and not gateway.rank.rows, 15)
        await wait_until_async(lambda: gateway.service.responding == 0, what="the connection to be cut")
        stubborn.client.close()


def unchunked(answer: bytes) -> bytes:
    """The body of a chunked answer."""
    _, _, body = answer.partition(b"\r\n\r\n")
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        found += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return found
