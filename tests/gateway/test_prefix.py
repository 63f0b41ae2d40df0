"""Which prompts are sent with digests of their pages, and what becomes of these without room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.gateway.prefix import Sharing
from mstar.messages.prefix import DIGEST_BYTES, page_digests
from tests.gateway.harness import MODEL, SALT, Gateway, serving

TOKENS = list(range(5, 45))
LONG = TOKENS * 6  # fits a page of a slab, and with a digest for each token it does not
BODY: dict[str, Any] = {"model": MODEL, "prompt": TOKENS, "max_tokens": 1}


def prompt(length: int = 40) -> np.ndarray:
    return np.arange(length, dtype=np.int32)


def test_with_a_cache_every_prompt_is_hashed_with_the_salt() -> None:
    found = Sharing(16, SALT, cache=True).digests([prompt(40), prompt(15)], 1)
    assert found == [page_digests(prompt(40), 16, SALT), b""]
    assert len(found[0]) == 2 * DIGEST_BYTES


def test_without_a_cache_only_the_choices_of_a_request_share_and_nobody_else_can() -> None:
    sharing = Sharing(16, SALT, cache=False)
    assert sharing.digests([prompt()], 1) == [b""]
    first, second = sharing.digests([prompt()], 2), sharing.digests([prompt()], 2)
    assert len(first[0]) == 2 * DIGEST_BYTES
    assert first[0][:DIGEST_BYTES] != second[0][:DIGEST_BYTES]


def test_without_a_salt_nothing_is_hashed() -> None:
    assert Sharing(16, b"", cache=True).digests([prompt()], 2) == [b""]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_digests_travel_behind_the_tokens_of_a_prompt(
    tiny_model_dir: Path, tmp_path: Path, cache: bool, n: int
) -> None:
    async with (
        serving(tiny_model_dir, tmp_path, prefix_cache=cache, page_size=8) as gateway,
        gateway.http() as client,
    ):
        for _ in range(2):
            response = await client.post("/v1/completions", json={**BODY, "n": n})
            assert response.status_code == 200
    rank = gateway.rank
    assert [rank.prompts[admit.request].tolist() for admit in rank.admitted] == [TOKENS] * 2 * n
    assert {admit.hashes for admit in rank.admitted} == ({5} if cache or n > 1 else {0})
    distinct = {rank.digests[admit.request] for admit in rank.admitted}
    if cache:
        assert distinct == {page_digests(np.array(TOKENS, np.int32), 8, SALT)}
    else:
        assert len(distinct) == (2 if n > 1 else 1)


async def counted(gateway: Gateway) -> int:
    async with gateway.http() as client:
        text = (await client.get("/metrics")).text
    line = next(line for line in text.splitlines() if line.startswith("mstar_prompts_unshared_total{"))
    return int(float(line.split()[-1]))


@pytest.mark.parametrize(
    ("blocks", "prompts"),
    [(((4096, 4),), 1), (((4096, 3), (8192, 1)), 2)],
    ids=["no block is large enough", "not enough blocks are"],
)
async def test_prompts_whose_digests_find_no_room_are_served_without(
    tiny_model_dir: Path, tmp_path: Path, blocks: tuple[tuple[int, int], ...], prompts: int
) -> None:
    context = {"prompt_blocks": blocks}
    async with (
        serving(tiny_model_dir, tmp_path, context=context, page_size=1) as gateway,
        gateway.http() as client,
    ):
        response = await client.post("/v1/completions", json={**BODY, "prompt": [LONG] * prompts})
        assert response.status_code == 200
        rank = gateway.rank
        assert [(admit.hashes, len(rank.prompts[admit.request])) for admit in rank.admitted] == (
            [(0, len(LONG))] * prompts
        )
        assert await counted(gateway) == prompts
        assert gateway.ctx.slabs["prompts/0"].leased == 0
