"""More than can be served: 429 with Retry-After at once, whatever ran full, and aborts that always arrive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mstar.gateway.admission import fits_empty
from mstar.gateway.tuning import Tuning
from tests.gateway.harness import MODEL, Gateway, serving
from tests.gateway.raw import RawClient, http_post
from tests.helpers.waiting import wait_until_async

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3}


@pytest.mark.behaviour("F-22")
@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_burst_of_ten_times_the_limit_the_limit_is_served_and_the_rest_told_to_come_again(
    tiny_model_dir: Path, tmp_path: Path, stream: bool
) -> None:
    async with (
        serving(tiny_model_dir, tmp_path, max_concurrent_requests=4) as gateway,
        gateway.http() as client,
    ):
        gateway.rank.credit = 0
        asked = [
            asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": stream}))
            for _ in range(40)
        ]
        refused = 0
        for done in asyncio.as_completed(asked):
            response = await done
            if response.status_code == 429:
                refused += 1
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] == "overloaded"
                assert "at most 4" in response.json()["error"]["message"]
            if refused == 36:
                gateway.rank.grant(None)
        statuses = sorted(response.result().status_code for response in asked)
        assert statuses == [200] * 4 + [429] * 36
        assert gateway.service.conductor.live == 0
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.behaviour("F-22")
async def test_clients_that_stall_in_a_small_body_take_no_places(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async with serving(tiny_model_dir, tmp_path, max_concurrent_requests=2) as gateway:
        stalled = [await RawClient.connect(gateway.port) for _ in range(4)]
        for client in stalled:
            await client.send(http_post("/v1/completions", BODY)[:-3])
        await wait_until_async(lambda: gateway.service.responding == 4)
        async with gateway.http() as http:
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        for client in stalled:
            client.sock.close()


@pytest.mark.behaviour("F-22")
async def test_a_full_tokenizing_queue_is_a_429(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    tuning = Tuning(inline_bytes=0)
    async with serving(tiny_model_dir, tmp_path, tuning=tuning, max_concurrent_requests=3) as gateway:
        go_on = threading.Event()
        tokenize = gateway.service.intake.tokenize

        def slow(*args: Any, **kwargs: Any) -> Any:
            go_on.wait(10)
            return tokenize(*args, **kwargs)

        monkeypatch.setattr(gateway.service.intake, "tokenize", slow)
        async with gateway.http() as client:
            waiting = [asyncio.create_task(client.post("/tokenize", json={"prompt": "x"})) for _ in range(3)]
            await wait_until_async(lambda: gateway.service.pool.statistics().pending == 3)
            beyond = await client.post("/tokenize", json={"prompt": "x"})
            go_on.set()
            answers = [await one for one in waiting]
    assert beyond.status_code == 429
    assert "retry-after" in beyond.headers
    assert [answer.status_code for answer in answers] == [200] * 3


async def full(gateway: Gateway) -> None:
    """Nothing was admitted of what was refused, and the gateway serves on."""
    gateway.rank.take()
    assert gateway.rank.rows == {}
    assert gateway.service.book.live == gateway.service.conductor.live == 0
    async with gateway.http() as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.behaviour("F-22")
async def test_a_full_slab_is_a_429_and_leaves_no_lease(tiny_model_dir: Path, tmp_path: Path) -> None:
    context = {"prompt_blocks": ((4096, 4),)}
    async with serving(tiny_model_dir, tmp_path, context=context) as gateway, gateway.http() as client:
        gateway.rank.deaf = True
        live = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await wait_until_async(lambda: gateway.service.book.live == 1)
        response = await client.post("/v1/completions", json={**BODY, "prompt": ["hello"] * 4})
        assert response.status_code == 429
        assert "retry-after" in response.headers
        gateway.rank.deaf = False
        gateway.rank.grant(None)
        assert (await live).status_code == 200
        assert len(gateway.rank.admitted) == 1
        await full(gateway)
        assert gateway.ctx.slabs["prompts/0"].leased == 0


@pytest.mark.behaviour("F-18", "F-22")
async def test_a_full_ring_is_a_429_and_an_abort_still_arrives(tiny_model_dir: Path, tmp_path: Path) -> None:
    context = {"admit_bytes": 4096}
    async with serving(tiny_model_dir, tmp_path, context=context) as gateway, gateway.http() as client:
        gateway.rank.deaf = True
        live = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(12)]
        await wait_until_async(lambda: gateway.service.book.live == 12)
        response = await client.post("/v1/completions", json={**BODY, "prompt": ["hello"] * 14, "n": 6})
        assert response.status_code == 429
        sent = gateway.service.admissions[0].statistics()
        for one in live:
            one.cancel()
        await wait_until_async(lambda: gateway.service.book.live == 0)
        gateway.rank.deaf = False
        gateway.rank.grant(None)
        await wait_until_async(lambda: gateway.service.admissions[0].statistics().waiting_aborts == 0)
        admitted = {admit.request for admit in gateway.rank.admitted}
        await wait_until_async(
            lambda: set(gateway.rank.aborted) == admitted, what="all that was sent to be dropped"
        )
        assert sent.waiting_aborts > 0
        assert sent.aborted - sent.waiting_aborts > 4, "the reserved room takes aborts while data finds none"
        await full(gateway)
        assert gateway.ctx.slabs["prompts/0"].leased == 0


async def test_the_choices_of_a_prompt_share_its_block(tiny_model_dir: Path, tmp_path: Path) -> None:
    context = {"prompt_blocks": ((4096, 1),)}
    async with serving(tiny_model_dir, tmp_path, context=context) as gateway, gateway.http() as client:
        response = await client.post("/v1/completions", json={**BODY, "n": 128, "temperature": 1})
        assert response.status_code == 200
        assert [admit.sampling.choice for admit in gateway.rank.admitted] == list(range(128))
        assert gateway.ctx.slabs["prompts/0"].leased == 0


@pytest.mark.parametrize("context", [{"prompt_blocks": ((4096, 4),)}, {"admit_bytes": 4096}])
async def test_a_request_that_an_idle_server_could_not_take_is_a_400_and_no_429(
    tiny_model_dir: Path, tmp_path: Path, context: dict[str, Any]
) -> None:
    async with serving(tiny_model_dir, tmp_path, context=context) as gateway, gateway.http() as client:
        response = await client.post("/v1/completions", json={**BODY, "prompt": ["hello"] * 65})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        assert "65 prompts" in response.json()["error"]["message"]
        await wait_until_async(lambda: gateway.service.admissions[0].statistics().waiting_aborts == 0)
        gateway.rank.take()
        await full(gateway)
        assert gateway.ctx.slabs["prompts/0"].leased == 0


@pytest.mark.behaviour("F-22")
async def test_a_line_that_is_full_at_the_rank_is_a_429_with_retry_after_too(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async with serving(tiny_model_dir, tmp_path) as gateway, gateway.http() as client:
        gateway.rank.credit = 0
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await wait_until_async(lambda: len(gateway.rank.admitted) == 1)
        gateway.rank.fail_row(gateway.rank.admitted[0].request, "8 requests already wait for a slot", 429)
        response = await asked
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ([], True),
        ([4, 4, 4], True),
        ([4, 4, 4, 4], False),
        ([8, 4, 4], True),
        ([8, 8, 4], False),
        ([9], False),
    ],
)
def test_small_prompts_may_take_large_blocks_and_never_the_other_way(sizes: list[int], fits: bool) -> None:
    assert fits_empty(sizes, [(4, 2), (8, 1)]) is fits
