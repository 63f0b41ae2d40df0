"""From the first 503 to the last error event: readiness, a rank that dies, and the drain."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import MODEL, Gateway, serving
from tests.gateway.raw import NativeClient, RawClient, events, http_post
from tests.gateway.test_streams import unchunked
from tests.helpers.waiting import wait_until_async

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 50}


async def test_before_the_rank_is_ready_everything_but_health_is_503_with_its_stage(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async with serving(tiny_model_dir, tmp_path, ready=False) as gateway, gateway.http() as client:
        ready = await client.get("/ready")
        asked = await client.post("/v1/completions", json=BODY)
        assert (await client.get("/health")).status_code == 200
        gateway.service.ready("rank/0")
        after = await client.get("/ready")
    for response in (ready, asked):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["stage"] == "rank/0: loading 3/12"
    assert after.status_code == 200
    assert after.json()["ready"] is True


@pytest.mark.behaviour("F-19")
async def test_a_rank_that_dies_ends_each_request_once_and_its_successor_serves(gateway: Gateway) -> None:
    gateway.rank.credit = 2
    async with gateway.http() as client:
        asked = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(5)]
        await wait_until_async(lambda: len(gateway.rank.rows) == 5 and gateway.rank.credit == 0)
        gateway.rank.die("rank/0 was killed by SIGKILL")
        answers = [await one for one in asked]
        refused = await client.post("/v1/completions", json=BODY)
        not_ready = await client.get("/ready")
        gateway.rank.revive()
        gateway.rank.grant(None)
        served = await client.post("/v1/completions", json=BODY)
    assert [answer.status_code for answer in answers] == [500] * 5
    assert "SIGKILL" in answers[0].json()["error"]["message"]
    assert (refused.status_code, not_ready.status_code) == (503, 503)
    for answer in (refused, not_ready):
        assert "not ready to serve (rank/0: " in answer.json()["error"]["message"]
    assert served.status_code == 200
    assert gateway.service.conductor.live == 0


async def test_what_a_dead_rank_had_sent_is_delivered_first(gateway: Gateway) -> None:
    gateway.rank.credit = 0
    async with gateway.http() as client:
        asked = asyncio.create_task(client.post("/v1/completions", json={**BODY, "max_tokens": 2}))
        await wait_until_async(lambda: gateway.rank.rows)
        gateway.rank.step()
        gateway.rank.step()
        gateway.rank.die()
        answer = await asked
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 2


async def test_late_rows_of_a_dead_generation_are_dropped(gateway: Gateway) -> None:
    gateway.rank.die()
    gateway.rank.revive()
    async with gateway.http() as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def draining(gateway: Gateway) -> None:
    gateway.ctx.stop()
    await wait_until_async(lambda: gateway.service.draining)


@pytest.mark.behaviour("F-31")
async def test_a_drain_refuses_new_requests_and_lets_streams_finish(gateway: Gateway) -> None:
    gateway.rank.credit = 2
    async with gateway.http() as client:
        streams = [
            asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": True}))
            for _ in range(3)
        ]
        await wait_until_async(lambda: len(gateway.rank.rows) == 3 and gateway.rank.credit == 0)
        await draining(gateway)
        ready = await client.get("/ready")
        refused = await client.post("/v1/completions", json=BODY)
        alive = await client.get("/health")
        gateway.rank.grant(None)
        answers = [await one for one in streams]
        async with asyncio.timeout(5):
            await gateway.run
    assert (ready.status_code, ready.json()["error"]["stage"]) == (503, "draining")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in refused.headers
    assert alive.status_code == 200
    for answer in answers:
        assert events(answer.content)[-1] == "[DONE]"


@pytest.mark.behaviour("F-31")
@pytest.mark.parametrize("cause", ["time", "second signal"])
async def test_what_does_not_finish_in_time_ends_with_one_error_event(
    tiny_model_dir: Path, tmp_path: Path, cause: str
) -> None:
    seconds = 0.05 if cause == "time" else 600.0
    async with serving(tiny_model_dir, tmp_path, drain_seconds=seconds) as gateway:
        gateway.rank.credit = 2
        stream = await RawClient.connect(gateway.port)
        await stream.send(http_post("/v1/completions", {**BODY, "stream": True}))
        head = await stream.until(b"data: ")
        native = await NativeClient.open(gateway.uds)
        await native.ask(op="generate", id=1, kind="completion", body=BODY)
        async with gateway.http() as client:
            whole = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await wait_until_async(lambda: len(gateway.rank.rows) == 3)
            await draining(gateway)
            if cause != "time":
                gateway.ctx.hastened = True
            async with asyncio.timeout(5):
                await gateway.run
            assert gateway.service.responding == 0, "the last words were written before it returned"
            answer = await whole
        *chunks, last = events(unchunked(head + await stream.until(b"0\r\n\r\n")))
        ended = await native.until_end(1)
        stream.close()
        native.close()
    assert answer.status_code == 503
    assert chunks
    assert last["error"]["code"] == "draining"
    assert ended[-1]["error"]["code"] == "draining"
    assert [event["event"] for event in ended].count("error") == 1


@pytest.mark.behaviour("F-31")
async def test_an_idle_gateway_drains_at_once(gateway: Gateway) -> None:
    gateway.ctx.stop()
    async with asyncio.timeout(2):
        await gateway.run


async def test_the_unix_socket_stays_where_the_daemon_bound_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tiny_model_dir, tmp_path) as gateway:
        path = gateway.uds
    assert os.path.exists(path)  # noqa: ASYNC240
