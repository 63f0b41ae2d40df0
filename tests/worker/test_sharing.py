"""Prompts that begin alike run once: the prefix cache, and the choices of one request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.messages.prefix import page_digests
from mstar.messages.step import StepPlan
from tests.worker.null_rank import LIMITS, SALT, NullRank, expected

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


class Chunks:
    """What a rank is told to run of inputs: (request, start, end, stride) in order."""

    def __init__(self, rank: NullRank) -> None:
        self.seen: list[tuple[int, int, int, int]] = []
        rank.on_launch = self._watch

    def _watch(self, plan: StepPlan) -> None:
        columns = (plan.request, plan.chunk_starts, plan.chunk_ends, plan.chunk_strides)
        for request, start, end, stride in zip(
            *(column[: plan.chunk_starts.size].tolist() for column in columns), strict=True
        ):
            if start >= 0:
                self.seen.append((request, start, end, stride))

    def tokens(self, request: int) -> int:
        return sum(end - start for who, start, end, _ in self.seen if who == request)


@pytest.mark.behaviour("S0-24", "S4-04")
@DEPTHS
def test_a_prompt_sent_again_skips_its_cached_pages(depth: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth))
    chunks = Chunks(rank)
    for request in (1, 2):
        rank.admit(request, prompt=70, family=9)
        rank.drain()
    assert chunks.tokens(1) == 70
    assert chunks.tokens(2) == 70 - 68  # 17 pages of 4 are cached, the last token runs always
    assert [entry[1:] for entry in chunks.seen if entry[0] == 2] == [(68, 70, 70)]
    assert rank.scheduler.statistics().cached_tokens == 68
    for request in (1, 2):
        assert rank.kept[request].tokens == expected(request, 70, 4)
    rank.check_idle()


def test_a_prompt_that_fills_its_pages_exactly_still_runs_its_last_page() -> None:
    rank = NullRank()
    chunks = Chunks(rank)
    for request in (1, 2):
        rank.admit(request, prompt=64, family=9)
        rank.drain()
    assert chunks.tokens(2) == 4


def test_a_longer_prompt_starts_past_what_it_has_in_common_with_an_earlier_one() -> None:
    rank = NullRank()
    chunks = Chunks(rank)
    rank.admit(1, prompt=41, family=9)
    rank.drain()
    rank.admit(2, prompt=81, family=9)
    rank.drain()
    assert chunks.tokens(2) == 81 - 40
    assert next(stride for who, _, _, stride in chunks.seen if who == 2) > 40


def test_generated_tokens_are_found_again_when_the_conversation_goes_on() -> None:
    rank = NullRank()
    rank.admit(1, prompt=10, max_tokens=50)
    rank.drain()
    conversation = np.array([*rank.prompts[1].tolist(), *expected(1, 10, 50), 5, 6, 7], np.int32)
    match = rank.node.ledger.match(page_digests(conversation, LIMITS.page_size, SALT), 99)
    assert match.pages == (10 + 50 - 1) // LIMITS.page_size  # the last token was never fed back
    assert match.idle == match.pages


@pytest.mark.behaviour("S0-20")
@DEPTHS
@pytest.mark.parametrize("cache", [True, False])
def test_choices_of_a_request_share_the_pages_of_its_prompt(depth: int, cache: bool) -> None:
    rank = NullRank(LIMITS._replace(depth=depth, prefix_cache=cache))
    chunks = Chunks(rank)
    held: list[int] = []
    rank.admit(1, prompt=62, max_tokens=9, count=4)
    while rank.turn() or not rank.scheduler.idle:
        held.append(rank.node.ledger.held)
    assert [chunks.tokens(request) for request in (1, 2, 3, 4)] == [62, 2, 2, 2]
    assert max(held) <= 15 + 4 * 4
    for request in (1, 2, 3, 4):
        assert rank.kept[request].tokens == expected(request, 62, 9)
    assert rank.released == [1]
    if not cache:
        assert rank.node.ledger.free == rank.node.ledger.total
    rank.check_idle()


def test_choices_of_a_prompt_without_a_full_page_do_not_wait_for_each_other() -> None:
    rank = NullRank()
    binds: list[int] = []
    rank.on_launch = lambda plan: binds.append(len(plan.binds))
    rank.admit(1, prompt=4, max_tokens=9, count=4)
    rank.drain()
    assert binds[0] == 4


@pytest.mark.parametrize("turns", range(6))
def test_when_the_choice_that_runs_the_prompt_is_aborted_the_others_still_come(turns: int) -> None:
    rank = NullRank(LIMITS._replace(depth=2))
    rank.admit(1, prompt=100, max_tokens=6, count=3)
    for _ in range(turns):
        rank.turn()
    rank.scheduler.abort(1)
    rank.drain()
    for request in (2, 3):
        assert rank.kept[request].tokens == expected(request, 100, 6)
    rank.check_idle()


def test_a_choice_behind_a_request_that_waits_for_pages_blocks_nobody() -> None:
    rank = NullRank(LIMITS._replace(pages=40))
    rank.admit(1, prompt=80, max_tokens=20, count=2)
    rank.admit(3, prompt=5, max_tokens=3)
    rank.drain()
    for request, prompt, budget in ((1, 80, 20), (2, 80, 20), (3, 5, 3)):
        assert rank.kept[request].tokens == expected(request, prompt, budget)
    rank.check_idle()


@pytest.mark.behaviour("B-11")
def test_an_abort_that_comes_before_its_request_is_kept_for_it() -> None:
    rank = NullRank()
    rank.scheduler.abort(5)
    rank.admit(5)
    rank.admit(6)
    rank.drain()
    assert rank.kept[5].tokens == []
    assert rank.kept[6].tokens == expected(6, 5, 4)
    assert sorted(rank.released) == [5, 6]
    rank.scheduler.abort(5)  # over already: nothing is kept for it
    rank.check_idle()


@pytest.mark.behaviour("F-20")
@settings(max_examples=80, deadline=None)
@given(
    depth=st.integers(0, 2),
    room=st.integers(104, 256),
    cache=st.booleans(),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("admit"), st.integers(1, 60), st.integers(1, 40), st.integers(1, 3)),
            st.tuples(st.just("abort"), st.integers(1, 40), st.just(0), st.just(0)),
            st.tuples(st.just("turn"), st.integers(1, 6), st.just(0), st.just(0)),
        ),
        min_size=1,
        max_size=40,
    ),
)
def test_random_families_of_prompts_read_their_own_pages(
    depth: int, room: int, cache: bool, events: list[tuple[str, int, int, int]]
) -> None:
    limits = LIMITS._replace(depth=depth, slots=5, horizon_tokens=8, prefix_cache=cache)
    rank = NullRank(limits._replace(pages=limits.pages_of(room)))
    owed: dict[int, tuple[int, int]] = {}
    aborted: set[int] = set()
    newest = 0
    for kind, first, second, third in events:
        if kind == "admit":
            newest += 1
            rank.admit(newest, prompt=first, max_tokens=second, count=third, family=third)
            for request in range(newest, newest + third):
                owed[request] = (first, second)
            newest += third - 1
        elif kind == "abort" and first <= newest:
            aborted.add(first)
            rank.scheduler.abort(first)
        elif kind == "turn":
            for _ in range(first):
                rank.turn()
                pages = rank.node.ledger.statistics()
                assert pages.free + pages.cached + pages.held == pages.total
    rank.drain()
    for request, (prompt, budget) in owed.items():
        if request not in aborted:
            assert rank.kept[request].tokens == expected(request, prompt, budget)
    rank.check_idle()


def test_who_waits_for_pages_is_let_in_when_others_may_be_shared() -> None:
    """Another runs its prompt: it fits as soon as those pages are there, not when that one ends."""
    rank = NullRank(LIMITS._replace(pages=34, max_seq_len=256, horizon_tokens=4, batch_tokens=16))
    rank.admit(1, prompt=100, max_tokens=30, family=9)
    rank.turn()
    rank.admit(2, prompt=100, max_tokens=2, family=9)
    while not rank.kept[2].finish:
        rank.turn()
    assert not rank.kept[1].finish
    rank.drain()
    rank.check_idle()


def test_rows_without_digests_keep_no_other_row_from_being_filed() -> None:
    rank = NullRank(LIMITS._replace(slots=16, pages=1024))
    for request in range(1, 13):
        rank.admit(request, prompt=20, max_tokens=200, shared=False)
    rank.admit(13, prompt=20, max_tokens=200)
    while rank.scheduler.statistics().generated_tokens < 13 * 100:
        rank.turn()
    slot = rank.node._slot_of[13]
    assert rank.node.slots.filed[slot] >= 20
    rank.drain()
    rank.check_idle()
