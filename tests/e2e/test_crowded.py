"""A cache of 40 pages under 64 requests at once: all of them finish, as if they had been alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import torch

from mstar.model.api import KVCache
from mstar.model.spec import read_spec
from tests.e2e.server import Server

pytestmark = pytest.mark.timeout(90)

PAGES, PAGE_SIZE, REQUESTS = 40, 16, 64


@pytest.fixture
def crowded(model: Path, folder: Path) -> Iterator[Server]:
    page = KVCache.nbytes_per_page(read_spec(model), PAGE_SIZE, torch.float32)
    flags = ("--kv-cache-bytes", PAGES * page, "--max-model-len", PAGES * PAGE_SIZE, "--dtype", "float32")
    with Server(model, folder, *flags, "--max-num-seqs", 16, "--threads", 1) as found:
        yield found


def prompts() -> list[tuple[list[int], int]]:
    """Token ids and budgets: most are short, some take half of the cache, some outgrow their horizon."""
    rng = np.random.default_rng(3)
    found = []
    for place in range(REQUESTS):
        length = int(rng.integers(200, 300)) if place % 9 == 0 else int(rng.integers(1, 90))
        budget = 300 if place in (5, 6, 7) else int(rng.integers(1, 24))
        found.append((rng.integers(3, 250, length).tolist(), budget))
    return found


async def answers(server: Server, *, at_once: int) -> list[tuple[str, int]]:
    gate = asyncio.Semaphore(at_once)

    async def ask(prompt: list[int], budget: int) -> tuple[str, int]:
        async with gate:
            answer = await client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=budget,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        assert answer.usage is not None
        return answer.choices[0].text, answer.usage.completion_tokens

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        return list(await asyncio.gather(*(ask(*prompt) for prompt in prompts())))


def counts(server: Server) -> dict[str, int]:
    with server.client() as client:
        ranks: dict[str, dict[str, int]] = client.status()["ranks"]
    return ranks["rank/0"]


@pytest.mark.behaviour("S0-21", "F-20")
async def test_a_small_cache_under_many_requests_finishes_them_all_and_counts_what_had_to_wait(
    crowded: Server,
) -> None:
    alone = await answers(crowded, at_once=2)
    before = counts(crowded)
    together = await answers(crowded, at_once=REQUESTS)
    assert [tokens for _, tokens in together] == [budget for _, budget in prompts()]
    # In company a multiplication has another shape, which may turn a tie within its rounding.
    differ = [place for place in range(REQUESTS) if together[place] != alone[place]]
    assert len(differ) <= REQUESTS // 20, differ
    after = counts(crowded)
    assert after["pages_total"] == PAGES
    assert after["page_refusals"] > before["page_refusals"]
    assert after["refused"] == 0
    assert after["preempted"] > before["preempted"]
    assert after["pages_free"] + after["pages_cached"] == PAGES
    assert after["evicted"] > 0
