"""The ledger against a naive one: nothing leaks, nothing shared is given away, nothing is mistaken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from numpy.typing import NDArray

from mstar.messages.prefix import DIGEST_BYTES, page_digests
from mstar.worker.ledger import Ledger, Match

PAGE = 2


def digests_of(*pages: int) -> bytes:
    """Digests of a prompt whose pages hold these numbers."""
    return page_digests(np.repeat(np.array(pages, np.int32), PAGE), PAGE, b"key")


def one(digests: bytes, place: int) -> bytes:
    return digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]


def hold(ledger: Ledger, count: int) -> NDArray[np.int32]:
    """Pages for a row that was just admitted."""
    ledger.promise(count)
    return ledger.take(count).copy()


def computed(ledger: Ledger, digests: bytes) -> NDArray[np.int32]:
    """Pages of a row that has computed the prompt with these digests, filed."""
    pages = hold(ledger, len(digests) // DIGEST_BYTES)
    ledger.file(pages, digests)
    return pages


def test_a_page_nobody_holds_is_found_again_and_counts_as_available() -> None:
    ledger, digests = Ledger(8), digests_of(1, 2, 3)
    pages = computed(ledger, digests)
    assert ledger.match(digests, 9) == Match(3, 0)
    ledger.give(pages)
    assert (ledger.free, ledger.cached, ledger.held, ledger.available) == (5, 3, 0, 8)
    assert ledger.match(digests, 9) == Match(3, 3)
    assert ledger.lease(digests, 2).tolist() == pages[:2].tolist()
    assert (ledger.free, ledger.cached, ledger.held, ledger.available) == (5, 1, 2, 6)


def test_a_match_ends_at_the_limit_and_at_the_first_page_that_differs() -> None:
    ledger, digests = Ledger(8), digests_of(1, 2, 3)
    computed(ledger, digests)
    assert ledger.match(digests, 2).pages == 2
    assert ledger.match(digests, 9).pages == 3
    assert ledger.match(digests_of(1, 2, 4), 9).pages == 2
    assert ledger.match(digests_of(2, 2, 3), 9).pages == 0
    assert ledger.match(b"", 9).pages == 0


def test_a_match_that_was_made_before_sees_what_was_filed_and_evicted_since() -> None:
    ledger, digests = Ledger(4), digests_of(1, 2, 3)
    pages = hold(ledger, 3)
    ledger.file(pages[:1], one(digests, 0))
    assert ledger.match(digests, 3).pages == 1
    ledger.file(pages[1:2], one(digests, 1))
    assert ledger.match(digests, 3).pages == 2
    ledger.give(pages)
    hold(ledger, 3)
    assert ledger.match(digests, 3).pages == 1


def test_a_shared_page_returns_with_its_last_holder() -> None:
    ledger, digests = Ledger(4), digests_of(1, 2)
    first = computed(ledger, digests)
    second = ledger.lease(digests, 2).copy()
    ledger.give(first)
    assert ledger.held == 2
    ledger.give(second)
    assert (ledger.held, ledger.cached) == (0, 2)


def test_pages_that_were_used_longest_ago_go_first_and_the_tail_of_a_row_before_its_head() -> None:
    ledger, old, new = Ledger(6), digests_of(1, 2, 3), digests_of(4, 5, 6)
    first, second = computed(ledger, old), computed(ledger, new)
    ledger.give(first)
    ledger.give(second)
    ledger.give(ledger.lease(old, 1).copy())
    gone = [int(hold(ledger, 1)[0]) for _ in range(6)]
    assert gone == [*first[:0:-1], *second[::-1], first[0]]
    assert ledger.statistics().evicted == 6


def test_free_pages_go_before_cached_ones() -> None:
    ledger, digests = Ledger(4), digests_of(1, 2)
    ledger.give(computed(ledger, digests))
    hold(ledger, 2)
    assert ledger.match(digests, 2).pages == 2
    hold(ledger, 1)
    assert ledger.match(digests, 2).pages == 1


def test_a_large_pool_evicts_some_pages_ahead_and_the_last_one_if_it_must() -> None:
    ledger = Ledger(640)
    ledger.give(computed(ledger, digests_of(*range(640))))
    hold(ledger, 1)
    assert (ledger.free, ledger.cached, ledger.held, ledger.available) == (9, 630, 1, 639)
    hold(ledger, 9)
    assert (ledger.free, ledger.cached) == (0, 630)
    hold(ledger, 630)
    assert (ledger.free, ledger.cached, ledger.held) == (0, 0, 640)
    ledger.check()


def test_what_is_promised_is_not_leased_away() -> None:
    ledger, digests = Ledger(4), digests_of(1, 2, 3)
    ledger.give(computed(ledger, digests))
    ledger.promise(2)
    assert ledger.available == 2
    with pytest.raises(RuntimeError, match="3 idle pages leased, 2 available"):
        ledger.lease(digests, 3)
    assert ledger.lease(digests, 2).size == 2
    assert ledger.take(2).size == 2


def test_more_than_matches_is_not_leased() -> None:
    with pytest.raises(RuntimeError, match="2 pages leased, 0 match"):
        Ledger(4).lease(digests_of(1, 2), 2)


def test_a_digest_stays_with_the_page_that_had_it_first() -> None:
    ledger, digests = Ledger(4), digests_of(1, 2)
    first, second = computed(ledger, digests), computed(ledger, digests)
    ledger.give(second)
    assert (ledger.free, ledger.cached) == (2, 0)
    assert ledger.lease(digests, 2).tolist() == first.tolist()


def test_a_page_has_one_digest() -> None:
    ledger = Ledger(4)
    page = int(computed(ledger, digests_of(1))[0])
    ledger.file(np.array([page], np.int32), digests_of(1))
    with pytest.raises(RuntimeError, match=f"page {page} holds what"):
        ledger.file(np.array([page], np.int32), digests_of(2))
    assert ledger.match(digests_of(2), 1).pages == 0


def test_without_a_cache_pages_are_shared_while_they_are_held_and_free_after() -> None:
    ledger, digests = Ledger(4, keep=False), digests_of(1, 2)
    first = computed(ledger, digests)
    second = ledger.lease(digests, 2).copy()
    ledger.give(first)
    assert ledger.match(digests, 2) == Match(2, 0)
    ledger.give(second)
    assert (ledger.free, ledger.cached) == (4, 0)
    assert ledger.match(digests, 2).pages == 0
    ledger.check()


def test_pages_that_nobody_holds_are_not_returned() -> None:
    ledger, digests = Ledger(4), digests_of(1, 2)
    pages = computed(ledger, digests)
    ledger.give(pages)
    others = hold(ledger, 2)
    with pytest.raises(RuntimeError, match="nobody holds them"):
        ledger.give(pages)
    with pytest.raises(RuntimeError, match="3 pages returned, 2 of 4 are held"):
        ledger.give(np.append(others, others[:1]))


@pytest.mark.behaviour("F-20")
def test_a_ledger_that_does_not_add_up_says_so() -> None:
    ledger = Ledger(4)
    pages = hold(ledger, 2)
    ledger.check()
    ledger.give(pages[[0, 0]])
    with pytest.raises(RuntimeError, match="does not add up"):
        ledger.check()


def test_a_row_takes_no_more_than_was_promised() -> None:
    ledger = Ledger(4)
    ledger.promise(1)
    with pytest.raises(RuntimeError, match="2 pages taken, 4 free, 0 cached, 1 promised"):
        ledger.take(2)


class Row:
    """A row of the model: its prompt's digests, its pages, how many of them are filed, what is promised."""

    def __init__(self, digests: bytes, pages: list[int], filed: int, promised: int) -> None:
        self.digests = digests
        self.pages = pages
        self.filed = filed
        self.promised = promised


class Pool(RuleBasedStateMachine):
    """A pool that is too small, prompts that begin alike, and a model of lists and dictionaries."""

    rows = Bundle("rows")
    total = 10
    keep = True

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.total, keep=self.keep)
        self.live: list[Row] = []
        self.unused = set(range(self.total))
        self.holders = dict.fromkeys(range(self.total), 0)
        self.contents: dict[int, bytes | None] = dict.fromkeys(range(self.total))
        self.order: list[int] = []

    @rule(target=rows, prompt=st.lists(st.integers(0, 1), max_size=6), more=st.integers(0, 3))
    def admit(self, prompt: list[int], more: int) -> Row:
        digests = digests_of(*prompt)
        limit = max(0, len(prompt) - 1)
        match = self.ledger.match(digests, limit)
        known = {content: page for page, content in self.contents.items() if content is not None}
        expected = []
        for place in range(limit):
            page = known.get(one(digests, place))
            if page is None:
                break
            expected.append(page)
        idle = sum(not self.holders[page] for page in expected)
        assert match == (len(expected), idle)
        horizon = len(prompt) + more
        if horizon - match.pages + match.idle > self.ledger.available:
            return Row(b"", [], 0, 0)
        pages = self.ledger.lease(digests, match.pages).tolist()
        assert pages == expected
        self.ledger.promise(horizon - match.pages)
        for page in pages:
            self.holders[page] += 1
            if page in self.order:
                self.order.remove(page)
        row = Row(digests, pages, match.pages, horizon - match.pages)
        self.live.append(row)
        return row

    @rule(row=rows, count=st.integers(1, 3))
    def grow(self, row: Row, count: int) -> None:
        count = min(count, row.promised)
        pages = self.ledger.take(count).tolist()
        evicted = self.order[: max(0, count - len(self.unused))]
        assert len(set(pages)) == count
        assert set(pages) - set(evicted) <= self.unused
        assert set(evicted) <= set(pages)
        del self.order[: len(evicted)]
        for page in pages:
            assert not self.holders[page]
            self.unused.discard(page)
            self.holders[page] = 1
            self.contents[page] = None
        row.pages += pages
        row.promised -= count

    @rule(row=rows)
    def land(self, row: Row) -> None:
        if row.filed < min(len(row.digests) // DIGEST_BYTES, len(row.pages)):
            page, digest = row.pages[row.filed], one(row.digests, row.filed)
            self.ledger.file(np.array([page], np.int32), digest)
            if digest not in self.contents.values():
                self.contents[page] = digest
            row.filed += 1

    @rule(row=consumes(rows))
    def end(self, row: Row) -> None:
        if row not in self.live:
            return
        self.live.remove(row)
        self.ledger.withdraw(row.promised)
        self.ledger.give(np.array(row.pages, np.int32))
        for page in reversed(row.pages):
            self.holders[page] -= 1
            if not self.holders[page]:
                if self.keep and self.contents[page] is not None:
                    self.order.append(page)
                else:
                    self.contents[page] = None
                    self.unused.add(page)

    @precondition(lambda self: not self.live)
    @invariant()
    def nothing_is_held_when_idle(self) -> None:
        assert self.ledger.held == 0
        assert self.ledger.free + self.ledger.cached == self.total

    @invariant()
    def it_adds_up(self) -> None:
        found = self.ledger.statistics()
        assert found.free + found.cached + found.held == found.total == self.total
        assert (found.free, found.cached) == (len(self.unused), len(self.order))
        assert found.promised == sum(row.promised for row in self.live) <= found.free + found.cached
        self.ledger.check()


class Uncached(Pool):
    keep = False


LENGTH = settings(max_examples=50, stateful_step_count=40)

test_a_pool_with_a_cache_does_what_the_model_does = pytest.mark.behaviour("F-20")(Pool.TestCase)
test_a_pool_with_a_cache_does_what_the_model_does.settings = LENGTH
test_a_pool_without_one_does_what_the_model_does = Uncached.TestCase
test_a_pool_without_one_does_what_the_model_does.settings = LENGTH
