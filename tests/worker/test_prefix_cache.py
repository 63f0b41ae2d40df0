"""The prefix cache in a decider: what is skipped, what choices share, and that every page comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.messages.step import StepPlan
from tests.worker.null_rank import LIMITS, NullRank, expected

PAGE = LIMITS.page_size


class FirstChunks:
    """Of the first chunk of each request: start, end, stride, and the pages granted with it."""

    def __init__(self, rank: NullRank) -> None:
        self.seen: dict[int, tuple[int, int, int, list[int]]] = {}
        rank.on_launch = self.look

    def look(self, plan: StepPlan) -> None:
        for row in range(plan.chunk_starts.size):
            request, slot, start = int(plan.request[row]), plan.slot[row], int(plan.chunk_starts[row])
            if start >= 0 and request not in self.seen:
                pages = plan.grant_page[plan.grant_slot == slot].tolist()
                self.seen[request] = (start, int(plan.chunk_ends[row]), int(plan.chunk_strides[row]), pages)


@pytest.mark.behaviour("S0-24")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_prompt_sent_again_starts_past_its_cached_pages_which_come_with_its_first_chunk(depth: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth))
    chunks = FirstChunks(rank)
    for request, prompt in ((1, 20), (2, 20), (3, 30)):
        rank.admit(request, prompt=prompt, max_tokens=1, family=9)
        rank.drain()
    whole, again, longer = (chunks.seen[request] for request in (1, 2, 3))
    assert whole[:2] == (0, 20)
    assert again[:3] == (16, 20, 20), "the last token of a prompt always runs"
    assert longer[:3] == (20, 30, 30)
    assert whole[3][:4] == again[3][:4] == longer[3][:4]
    assert rank.scheduler.statistics().cached_tokens == 36
    rank.check_idle()


@pytest.mark.parametrize("cache", [True, False])
def test_the_choices_of_a_request_compute_their_prompt_once(cache: bool) -> None:
    rank = NullRank(LIMITS._replace(prefix_cache=cache))
    rank.admit(1, prompt=20, max_tokens=8, count=4)
    most = 0
    while rank.turn():
        most = max(most, rank.node.ledger.held)
    for request in range(1, 5):
        assert rank.kept[request].tokens == expected(request, 20, 8)
    assert rank.scheduler.statistics().cached_tokens == 3 * 16
    assert most <= 4 + 4 * 3, "the prompt's pages are there once"
    assert (rank.node.ledger.cached > 0) == cache
    rank.check_idle()


def test_a_conversation_finds_the_pages_of_the_answer_too() -> None:
    rank = NullRank()
    rank.admit(1, prompt=8, max_tokens=9)
    rank.drain()
    ledger = rank.node.ledger
    assert ledger.cached == 4, "two pages of the prompt, two of the eight tokens that ran"


def test_a_cache_that_fills_the_pool_stands_in_nobodys_way() -> None:
    rank = NullRank(LIMITS._replace(pages=20))
    for request in range(1, 30):
        rank.admit(request, prompt=40, max_tokens=12)
        rank.drain()
        assert rank.kept[request].tokens == expected(request, 40, 12)
    counts = rank.scheduler.statistics()
    assert counts.preempted == counts.refused == 0
    assert rank.node.ledger.statistics().evicted > 200
    rank.check_idle()


@pytest.mark.behaviour("F-20")
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1), depth=st.integers(0, 2), cache=st.booleans(), pages=st.integers(24, 60)
)
def test_after_any_load_free_and_cached_pages_are_all_there_are(
    seed: int, depth: int, cache: bool, pages: int
) -> None:
    random = np.random.default_rng(seed)
    rank = NullRank(LIMITS._replace(depth=depth, pages=pages, prefix_cache=cache))
    asked: dict[int, tuple[int, int]] = {}
    aborted: set[int] = set()
    request = 0
    for _ in range(40):
        prompt, tokens, count = (int(random.integers(1, most)) for most in (60, 20, 4))
        rank.admit(request, prompt, tokens, family=int(random.integers(3)), count=count)
        asked.update(dict.fromkeys(range(request, request + count), (prompt, tokens)))
        request += count
        for _ in range(int(random.integers(4))):
            rank.turn()
        if random.random() < 0.3:
            victim = int(random.integers(request))
            rank.scheduler.abort(victim)
            aborted.add(victim)
        ledger = rank.node.ledger
        assert ledger.free + ledger.cached + ledger.held == ledger.total
    rank.drain()
    for each, (prompt, tokens) in asked.items():
        if each not in aborted and not rank.kept[each].failed:
            assert rank.kept[each].tokens == expected(each, prompt, tokens)
    rank.check_idle()
    rank.node.ledger.check()
