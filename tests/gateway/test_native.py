"""The native protocol: many requests on one connection, one terminal event each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mstar.gateway.tuning import Tuning
from mstar.model.tokenizer import Tokenizer
from tests.gateway.harness import MODEL, TEXT, Gateway, saying, serving
from tests.gateway.raw import NativeClient, RawClient
from tests.helpers.waiting import wait_until_async

BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 6, "stream": True}


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[NativeClient]:
    native = await NativeClient.open(gateway.uds)
    yield native
    native.close()


async def generate(client: NativeClient, ident: int, kind: str = "completion", **body: Any) -> list[Any]:
    await client.ask(op="generate", id=ident, kind=kind, body={**BODY, **body})
    return await client.until_end(ident)


async def test_a_generation_is_deltas_finish_and_done(
    client: NativeClient, tiny_tokenizer: Tokenizer
) -> None:
    *deltas, finish, done = await generate(client, 7)
    tokens = [token for delta in deltas for token in delta["tokens"]]
    assert all(delta["event"] == "delta" and delta["id"] == 7 and delta["choice"] == 0 for delta in deltas)
    assert tokens == tiny_tokenizer.encode(TEXT, add_special_tokens=False)[:6].tolist()
    assert "".join(delta["text"] for delta in deltas) == tiny_tokenizer.decode(
        tokens, skip_special_tokens=True
    )
    assert all(delta["logprobs"] is None for delta in deltas)
    assert finish == {"id": 7, "event": "finish", "choice": 0, "reason": "length"}
    assert done == {
        "id": 7,
        "event": "done",
        "usage": {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7},
    }


async def test_without_stream_a_choice_is_one_delta(client: NativeClient) -> None:
    found = await generate(client, 1, stream=False, n=2)
    assert [(event["event"], event.get("choice")) for event in found] == [
        ("delta", 0),
        ("finish", 0),
        ("delta", 1),
        ("finish", 1),
        ("done", None),
    ]
    assert len(found[0]["tokens"]) == 6


async def test_a_chat_is_generated(client: NativeClient, gateway: Gateway) -> None:
    found = await generate(client, 1, "chat", prompt=None, messages=[{"role": "user", "content": "hi"}])
    assert found[-1]["event"] == "done"
    prompt = next(iter(gateway.rank.prompts.values()))
    text = gateway.service.intake.tokenizer.decode(prompt, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_the_end_token_is_delivered_but_not_its_text(
    tiny_model_dir: Path, tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    async with serving(tiny_model_dir, tmp_path, script=saying(tiny_tokenizer, "hello")) as gateway:
        client = await NativeClient.open(gateway.uds)
        *deltas, finish, done = await generate(client, 1, max_tokens=50)
        client.close()
    tokens = [token for delta in deltas for token in delta["tokens"]]
    assert tokens[-1] in tiny_tokenizer.eos_ids
    assert "".join(delta["text"] for delta in deltas) == "hello"
    assert finish["reason"] == "stop"
    assert done["usage"]["completion_tokens"] == len(tokens)


async def test_logprobs_come_with_their_tokens(client: NativeClient) -> None:
    *deltas, _, _ = await generate(client, 1, logprobs=2)
    for delta in deltas:
        assert [entry["token_id"] for entry in delta["logprobs"]] == delta["tokens"]
        for entry in delta["logprobs"]:
            assert entry["logprob"] == -0.5
            assert [top["token_id"] for top in entry["top_logprobs"]] == [
                entry["token_id"],
                entry["token_id"] + 1,
            ]


async def test_many_requests_share_a_connection(client: NativeClient, gateway: Gateway) -> None:
    for ident in range(1, 51):
        await client.ask(op="generate", id=ident, kind="completion", body=BODY)
    ends: dict[int, int] = {}
    tokens: dict[int, int] = {}
    while len(ends) < 50:
        event = await client.event()
        if event["event"] == "delta":
            tokens[event["id"]] = tokens.get(event["id"], 0) + len(event["tokens"])
        elif event["event"] == "done":
            ends[event["id"]] = ends.get(event["id"], 0) + 1
    assert set(ends.values()) == {1}
    assert set(tokens.values()) == {6}
    assert gateway.service.conductor.live == 0


@pytest.mark.behaviour("F-17")
async def test_a_cancelled_request_ends_once_and_the_others_go_on(
    client: NativeClient, gateway: Gateway
) -> None:
    gateway.rank.credit = 2
    for ident in (1, 2):
        await client.ask(op="generate", id=ident, kind="completion", body={**BODY, "max_tokens": 40})
    await wait_until_async(lambda: len(gateway.rank.rows) == 2 and gateway.rank.credit == 0)
    await client.ask(op="cancel", id=1)
    first = await client.until_end(1)
    assert first[-1]["error"]["code"] == "cancelled"
    await wait_until_async(lambda: len(gateway.rank.aborted) == 1)
    await client.ask(op="cancel", id=1)
    gateway.rank.grant(None)
    second = await client.until_end(2)
    assert second[-1]["event"] == "done"
    assert all(event["id"] == 2 for event in second)


async def test_a_large_prompt_goes_by_a_thread_and_can_be_cancelled_there(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    async with serving(tiny_model_dir, tmp_path, tuning=Tuning(inline_bytes=10)) as gateway:
        client = await NativeClient.open(gateway.uds)
        assert (await generate(client, 1, prompt="hello " * 20))[-1]["event"] == "done"
        go_on = threading.Event()
        monkeypatch.setattr(gateway.service.intake, "recipe", lambda *a, **k: go_on.wait(10))
        await client.ask(op="generate", id=2, kind="completion", body={**BODY, "prompt": "hello " * 20})
        await wait_until_async(lambda: gateway.service.pool.statistics().pending == 1)
        await client.ask(op="cancel", id=2)
        assert (await client.until_end(2))[-1]["error"]["code"] == "cancelled"
        assert gateway.service.conductor.live == 0
        go_on.set()
        client.close()


@pytest.mark.behaviour("F-24")
@pytest.mark.parametrize(
    ("message", "status"),
    [
        ({"op": "generate", "kind": "completion", "body": {"prompt": "x", "n": 0}}, 400),
        ({"op": "generate", "kind": "completion", "body": {"prompt": "x", "model": "other"}}, 404),
        ({"op": "generate", "kind": "completion", "body": {}}, 400),
        ({"op": "generate", "kind": "completion", "body": [1]}, 400),
        ({"op": "generate", "kind": "completion", "body": {1: 2}}, 400),
        ({"op": "generate", "kind": "other", "body": {}}, 400),
        ({"op": "nothing", "body": {}}, 400),
        ({"op": "tokenize", "body": {"prompt": 1}}, 400),
        ({"op": "detokenize", "body": {"tokens": [100000]}}, 400),
    ],
)
async def test_a_bad_request_is_an_error_event_and_the_connection_lives(
    client: NativeClient, gateway: Gateway, message: dict[str, Any], status: int
) -> None:
    await client.ask(id=3, **message)
    (event,) = await client.until_end(3)
    assert event["event"] == "error"
    assert event["error"]["status"] == status
    assert {"message", "type", "param", "code"} <= set(event["error"])
    assert (await generate(client, 3))[-1]["event"] == "done"
    assert gateway.service.conductor.live == 0


@pytest.mark.parametrize(
    "frame",
    [
        b"\x05\x00\x00\x00hello",
        b"\xff\xff\xff\x7f",
        len(msgspec.msgpack.encode({"op": "ready", "id": 0})).to_bytes(4, "little")
        + msgspec.msgpack.encode({"op": "ready", "id": 0}),
        len(msgspec.msgpack.encode({"op": "ready", "id": -1})).to_bytes(4, "little")
        + msgspec.msgpack.encode({"op": "ready", "id": -1}),
    ],
)
async def test_a_stream_of_frames_that_cannot_be_followed_is_closed_with_a_reason(
    client: NativeClient, gateway: Gateway, frame: bytes
) -> None:
    await client.send(frame)
    event = await client.event()
    assert (event["id"], event["event"]) == (0, "error")
    assert await client.event() is None
    await wait_until_async(lambda: not gateway.service.connections)


async def test_an_id_that_is_in_use_closes_the_connection(client: NativeClient, gateway: Gateway) -> None:
    gateway.rank.credit = 0
    for _ in range(2):
        await client.ask(op="generate", id=1, kind="completion", body=BODY)
    event = await client.event()
    assert (event["id"], event["error"]["code"]) == (0, "invalid_id")
    assert await client.event() is None
    await wait_until_async(lambda: gateway.rank.aborted and not gateway.service.book.live)


async def test_questions_are_answered(client: NativeClient) -> None:
    answers = {}
    for ident, (op, body) in enumerate(
        [
            ("models", {}),
            ("ready", {}),
            ("status", {}),
            ("tokenize", {"prompt": "hello the"}),
            ("detokenize", {"tokens": [3, 4]}),
        ],
        1,
    ):
        await client.ask(op=op, id=ident, body=body)
        (event,) = await client.until_end(ident)
        assert event["event"] == "result"
        answers[op] = event["result"]
    assert [model["id"] for model in answers["models"]["data"]] == [MODEL]
    assert answers["ready"]["ready"] is True
    assert answers["status"]["daemon"]["pid"] == 1
    assert answers["tokenize"]["count"] == len(answers["tokenize"]["tokens"]) > 0
    assert answers["detokenize"]["prompt"] == "\x00\x01"


async def test_a_question_without_a_body_is_answered(client: NativeClient) -> None:
    await client.ask(op="models", id=1)
    assert (await client.until_end(1))[0]["event"] == "result"


async def test_a_preface_that_comes_byte_by_byte_is_understood(gateway: Gateway) -> None:
    native = NativeClient((await RawClient.connect(gateway.uds)).sock)
    message = msgspec.msgpack.encode({"op": "ready", "id": 1})
    for byte in b"MSTAR\x01\r\n" + len(message).to_bytes(4, "little") + message:
        await native.send(bytes([byte]))
        await asyncio.sleep(0)
    assert (await native.event())["event"] == "result"
    native.close()


async def test_http_methods_that_begin_like_the_preface_are_http(gateway: Gateway) -> None:
    client = await RawClient.connect(gateway.uds)
    await client.send(b"M")
    await client.send(b"OVE / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 404")
    client.close()


async def test_a_connection_that_says_nothing_is_closed(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tiny_model_dir, tmp_path, tuning=Tuning(preface_seconds=0.02)) as gateway:
        client = await RawClient.connect(gateway.uds)
        await client.send(b"MST")
        with contextlib.suppress(ConnectionResetError):
            assert await client.rest() == b""
        client.close()


@pytest.mark.behaviour("F-29")
async def test_deltas_merge_while_the_connection_is_behind(tiny_model_dir: Path, tmp_path: Path) -> None:
    tuning = Tuning(write_high=4096, write_low=1024, tick_seconds=0.01)
    async with serving(tiny_model_dir, tmp_path, tuning=tuning, send_buffer=8192) as gateway:
        client = await NativeClient.open(gateway.uds, receive_buffer=4096)
        for ident in range(1, 41):
            await client.ask(op="generate", id=ident, kind="completion", body={**BODY, "max_tokens": 200})
        await wait_until_async(lambda: len(gateway.rank.admitted) == 40 and not gateway.rank.rows, 15)
        tokens: dict[int, int] = {}
        deltas = done = 0
        while done < 40:
            event = await client.event()
            if event["event"] == "delta":
                deltas += 1
                tokens[event["id"]] = tokens.get(event["id"], 0) + len(event["tokens"])
            done += event["event"] == "done"
        client.close()
    assert set(tokens.values()) == {200}
    assert deltas < 40 * 200 / 2


async def test_a_request_cancelled_while_the_connection_is_behind_ends_once_and_last(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    tuning = Tuning(write_high=4096, write_low=1024, tick_seconds=0.01)
    async with serving(tiny_model_dir, tmp_path, tuning=tuning, send_buffer=8192) as gateway:
        gateway.rank.credit = 200
        client = await NativeClient.open(gateway.uds, receive_buffer=4096)
        for ident in range(1, 41):
            await client.ask(op="generate", id=ident, kind="completion", body={**BODY, "max_tokens": 300})
        await wait_until_async(lambda: gateway.service.connections)
        (connection,) = gateway.service.connections
        await wait_until_async(lambda: len(connection.late) == 40 and len(gateway.rank.rows) == 40)
        for ident in range(1, 21):
            await client.ask(op="cancel", id=ident)
        await client.ask(op="ready", id=99)
        gateway.rank.grant(None)
        events = await client.until_end(99)
        while {event["id"] for event in events if event["event"] == "done"} != set(range(21, 41)):
            events.append(await client.event())
        client.close()
    for ident in range(1, 21):
        mine = [event["event"] for event in events if event["id"] == ident]
        assert mine[-1] == "error"
        assert set(mine[:-1]) <= {"delta"}


@pytest.mark.behaviour("F-29")
@pytest.mark.parametrize("bound", ["time", "bytes"])
async def test_a_connection_that_stays_behind_is_cut(
    tiny_model_dir: Path, tmp_path: Path, bound: str
) -> None:
    tuning = Tuning(write_high=4096, write_low=1024, tick_seconds=0.01, slow_seconds=60, pending_bytes=20_000)
    if bound == "time":
        tuning = tuning._replace(slow_seconds=0.1, pending_bytes=1 << 30)
    async with serving(tiny_model_dir, tmp_path, tuning=tuning, send_buffer=8192) as gateway:
        client = await NativeClient.open(gateway.uds, receive_buffer=4096)
        for ident in range(1, 41):
            await client.ask(op="generate", id=ident, kind="completion", body={**BODY, "max_tokens": 500})
        await wait_until_async(lambda: gateway.service.slow_readers == 1, 15, what="the connection to be cut")
        await wait_until_async(lambda: gateway.service.book.live == gateway.service.conductor.live == 0)
        client.close()


async def test_who_reads_no_answers_is_not_asked_any_more_until_it_does(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    tuning = Tuning(write_high=4096, write_low=1024, pending_bytes=30_000)
    async with serving(tiny_model_dir, tmp_path, tuning=tuning, send_buffer=8192) as gateway:
        client = await NativeClient.open(gateway.uds, receive_buffer=4096)
        body = {"prompt": "hello " * 200}
        asking = asyncio.create_task(ask_all(client, 2000, body))
        await wait_until_async(lambda: gateway.service.connections)
        (connection,) = gateway.service.connections
        await wait_until_async(
            lambda: not connection._transport.is_reading(), what="the asking to be stopped"
        )
        held = connection._transport.get_write_buffer_size()
        answers = 0
        while answers < 2000:
            answers += (await client.event())["event"] == "result"
        await asking
        client.close()
    assert 30_000 < held < 2000 * 200


async def ask_all(client: NativeClient, count: int, body: dict[str, Any]) -> None:
    for ident in range(1, count + 1):
        await client.ask(op="tokenize", id=ident, body=body)


async def test_one_connection_may_not_open_requests_without_bound(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async with serving(tiny_model_dir, tmp_path, tuning=Tuning(frames_per_connection=2)) as gateway:
        gateway.rank.credit = 0
        client = await NativeClient.open(gateway.uds)
        for ident in (1, 2, 3):
            await client.ask(op="generate", id=ident, kind="completion", body=BODY)
        (event,) = await client.until_end(3)
        client.close()
    assert event["error"]["status"] == 429
    assert event["error"]["retry_after"] == 1


async def test_token_ids_go_to_the_rank_as_they_are(client: NativeClient, gateway: Gateway) -> None:
    prompt = list(range(3, 250))
    await generate(client, 1, prompt=prompt)
    assert next(iter(gateway.rank.prompts.values())).tolist() == prompt


async def test_frames_behind_a_large_one_wait_for_it(client: NativeClient, gateway: Gateway) -> None:
    gateway.rank.credit = 0
    large = {**BODY, "prompt": "hello", "user": "x" * 200_000}
    await client.ask(op="generate", id=1, kind="completion", body=large)
    await client.ask(op="cancel", id=1)
    await client.ask(op="ready", id=2)
    events = await client.until_end(2)
    assert [(event["id"], event["event"]) for event in events] == [(1, "error"), (2, "result")]
    assert events[0]["error"]["code"] == "cancelled"
    assert gateway.service.conductor.live == 0


async def test_a_connection_that_goes_while_a_large_frame_is_decoded_leaves_nothing(
    client: NativeClient, gateway: Gateway
) -> None:
    await client.ask(op="generate", id=1, kind="completion", body={**BODY, "user": "x" * 200_000})
    client.close()
    await wait_until_async(lambda: not gateway.service.connections and gateway.service.conductor.live == 0)
    await wait_until_async(lambda: gateway.service.pool.statistics().pending == 0)


async def test_a_large_frame_that_is_no_request_closes_the_connection(client: NativeClient) -> None:
    await client.ask(op="generate", body={"x": "x" * 200_000})
    event = await client.event()
    assert (event["id"], event["error"]["code"]) == (0, "invalid_frame")
    assert await client.event() is None
