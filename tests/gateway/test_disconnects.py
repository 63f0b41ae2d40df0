"""Clients that go away: their rows are dropped at once, whatever way they went and whatever they wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mstar.gateway.tuning import Tuning
from tests.gateway.harness import MODEL, Gateway, serving
from tests.gateway.raw import NativeClient, RawClient, http_post
from tests.helpers.waiting import wait_until_async

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 400, "n": 3}
WAYS = ["fin", "rst", "half-close"]


def leave(client: RawClient, how: str) -> None:
    if how == "fin":
        client.close()
    elif how == "rst":
        client.reset()
    else:
        client.half_close()


async def dropped(gateway: Gateway) -> None:
    await wait_until_async(lambda: len(gateway.rank.aborted) == 3, what="three rows to be dropped")
    assert gateway.service.book.live == 0
    assert gateway.service.conductor.live == 0
    assert gateway.service.statistics().book.outcomes == {"cancelled": 1}


@pytest.mark.behaviour("F-17")
@pytest.mark.parametrize("target", ["port", "uds"])
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_rows_are_dropped_when_the_client_goes(
    gateway: Gateway, target: str, how: str, stream: bool, tokens: int
) -> None:
    gateway.rank.credit = tokens
    client = await RawClient.connect(getattr(gateway, target))
    await client.send(http_post("/v1/completions", {**BODY, "stream": stream}))
    await wait_until_async(lambda: len(gateway.rank.rows) == 3 and gateway.rank.credit == 0)
    if stream and tokens:
        await client.until(b"data: ")
    leave(client, how)
    await dropped(gateway)
    client.close()


@pytest.mark.behaviour("F-17")
@pytest.mark.parametrize("how", WAYS)
async def test_a_native_connection_that_goes_drops_all_its_rows(gateway: Gateway, how: str) -> None:
    gateway.rank.credit = 2
    client = await NativeClient.open(gateway.uds)
    await client.ask(op="generate", id=1, kind="completion", body={**BODY, "stream": True})
    await client.event()
    leave(client, how)
    await dropped(gateway)
    client.close()


@pytest.mark.behaviour("F-17")
async def test_a_client_that_goes_while_its_prompt_is_tokenized_leaves_nothing(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    async with serving(tiny_model_dir, tmp_path, tuning=Tuning(inline_bytes=0)) as gateway:
        entered, go_on = threading.Event(), threading.Event()
        recipe = gateway.service.intake.recipe

        def slow(*args: Any, **kwargs: Any) -> Any:
            entered.set()
            go_on.wait(10)
            return recipe(*args, **kwargs)

        monkeypatch.setattr(gateway.service.intake, "recipe", slow)
        client = await RawClient.connect(gateway.port)
        await client.send(http_post("/v1/completions", BODY))
        await wait_until_async(entered.is_set)
        client.close()
        await wait_until_async(lambda: gateway.service.conductor.live == 0)
        assert gateway.service.pool.statistics().pending == 1
        go_on.set()
        await wait_until_async(lambda: gateway.service.pool.statistics().pending == 0)
    assert gateway.rank.admitted == []


@pytest.mark.behaviour("F-17")
async def test_a_client_that_goes_while_it_sends_its_body_gives_its_place_back(gateway: Gateway) -> None:
    client = await RawClient.connect(gateway.port)
    await client.send(http_post("/v1/completions", {**BODY, "user": "x" * 70_000})[:-10])
    await wait_until_async(lambda: gateway.service.conductor.live == 1)
    client.close()
    await wait_until_async(lambda: gateway.service.conductor.live == 0)
