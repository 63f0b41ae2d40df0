"""The event loop is never held: heavy work runs on threads, in pieces, and bounded."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.gateway import native, prefix
from mstar.model.tokenizer import Tokenizer
from tests.gateway.harness import MODEL, Gateway, serving
from tests.gateway.raw import NativeClient, RawClient, http_post
from tests.helpers.tiny_model import write_tiny_model

WORDS = "The hello of the world, caf\u00e9 and on it went in the town. "
# Seconds of CPU. The work itself takes several times as long; a busy machine only doubles what is left of it.
LONGEST_TURN = 0.060


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(50e-6)
    yield
    sys.setswitchinterval(before)


class Heartbeat:
    """A task that wakes every millisecond and keeps the most CPU time the loop's thread spent in between."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.beats = 0

    async def run(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.longest = max(self.longest, now - last)
            self.beats += 1
            last = now


def spied(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[threading.Thread]:
    """On which threads a method runs."""
    threads: list[threading.Thread] = []
    method: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return threads


def long_text(characters: int) -> str:
    return (WORDS * (characters // len(WORDS) + 1))[:characters]


def bodies() -> list[Any]:
    text = long_text(600_000)
    return [
        pytest.param("/v1/completions", {"prompt": text}, id="text"),
        pytest.param("/v1/completions", {"prompt": [5, 6, 7] * 40_000}, id="tokens"),
        pytest.param("/v1/completions", {"prompt": [[5, 6, 7] * 4_000] * 10}, id="token-lists"),
        pytest.param("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, id="chat"),
        pytest.param(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hello"}] * 10_000},
            id="messages",
        ),
        pytest.param("/tokenize", {"prompt": text}, id="tokenize"),
        pytest.param("/detokenize", {"tokens": [5, 6, 7] * 40_000}, id="detokenize"),
        pytest.param("/v1/completions", {"prompt": "x", "tools": [{}] * 50_000}, id="refused"),
    ]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a window of a million tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("wide") / "wide", max_position=1 << 20)


@pytest.mark.behaviour("F-15")
@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize(("path", "body"), bodies())
async def test_a_large_body_is_worked_on_by_a_thread_while_the_loop_beats(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    payload = json.dumps(
        {"model": MODEL, "max_tokens": 1, **body} if path.startswith("/v1") else body
    ).encode()
    request = http_post(path, payload, headers=("Connection: close",))
    context = {"prompt_blocks": ((4096, 8), (8 << 20, 16))}
    async with serving(wide_model, tmp_path, context=context) as gateway:
        intake = gateway.service.intake
        threads = [spied(monkeypatch, intake, name) for name in ("recipe", "tokenize", "detokenize")]
        threads.append(spied(monkeypatch, prefix, "page_digests"))
        gc.collect()
        gc.freeze()
        client = await RawClient.connect(gateway.port)
        heartbeat = Heartbeat()
        beating = asyncio.create_task(heartbeat.run())
        await client.send(request)
        answer = await client.rest()
        beating.cancel()
        client.close()
        gc.unfreeze()
    assert answer.startswith(b"HTTP/1.1 400" if "tools" in body else b"HTTP/1.1 200")
    assert threading.main_thread() not in [thread for found in threads for thread in found]
    assert bool(threads[-1]) == (path.startswith("/v1") and "tools" not in body)
    assert heartbeat.beats > 0
    assert heartbeat.longest < LONGEST_TURN


@pytest.mark.behaviour("F-15")
@pytest.mark.usefixtures("quick_switches")
async def test_a_large_native_frame_is_worked_on_by_a_thread(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(wide_model, tmp_path, context={"prompt_blocks": ((8 << 20, 4),)}) as gateway:
        threads = spied(monkeypatch, gateway.service.intake, "recipe")
        decoding = spied(monkeypatch, native, "decode_frame")
        client = await NativeClient.open(gateway.uds)
        heartbeat = Heartbeat()
        beating = asyncio.create_task(heartbeat.run())
        body = {"prompt": long_text(600_000), "max_tokens": 1}
        await client.ask(op="generate", id=1, kind="completion", body=body)
        events = await client.until_end(1)
        beating.cancel()
        client.close()
    assert events[-1]["event"] == "done"
    assert len(threads) == len(decoding) == 1
    assert threading.main_thread() not in threads + decoding
    assert heartbeat.longest < LONGEST_TURN


@pytest.mark.behaviour("F-15")
async def test_large_prompts_reach_the_rank_as_arrays_without_a_list_in_between(
    wide_model: Path, tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    text = long_text(100_000)
    async with serving(wide_model, tmp_path) as gateway, gateway.http() as client:
        recipe = gateway.service.intake.recipe(
            "completion", json.dumps({"model": MODEL, "prompt": text}).encode()
        )
        assert isinstance(recipe.prompts[0], np.ndarray)
        assert recipe.prompts[0].dtype == np.int32
        await client.post("/v1/completions", json={"model": MODEL, "prompt": text, "max_tokens": 1})
    expected = tiny_tokenizer.encode(text, add_special_tokens=True)
    assert np.array_equal(next(iter(gateway.rank.prompts.values())), expected)


@pytest.mark.behaviour("F-15")
async def test_a_short_request_is_not_held_up_by_long_prompts(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    recipe = gateway.service.intake.recipe

    def slow(kind: str, body: Any, **kwargs: Any) -> Any:
        if len(body) > gateway.service.tuning.inline_bytes:
            go_on.wait(10)
        return recipe(kind, body, **kwargs)

    monkeypatch.setattr(gateway.service.intake, "recipe", slow)
    async with gateway.http() as client:
        long = {"model": MODEL, "prompt": "hello the " * 300}
        waiting = [asyncio.create_task(client.post("/v1/completions", json=long)) for _ in range(4)]
        short = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert short.status_code == 200
        assert not any(task.done() for task in waiting)
        go_on.set()
        await asyncio.gather(*waiting)
