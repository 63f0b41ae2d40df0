"""Conductor: least loaded, bounded, and released on the terminal event alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.conductor.book import Conductor
from mstar.conductor.errors import NoDecider, Overloaded, UnknownDecider


def conductor(deciders: int = 2, capacity: int = 8) -> Conductor:
    book = Conductor(deciders, capacity, seed=1)
    for index in range(deciders):
        book.ready(index)
    return book


def test_a_request_goes_to_the_least_loaded_decider() -> None:
    book = conductor(3, 9)
    placed = [book.place(request) for request in range(9)]
    assert sorted(placed[:3]) == sorted(placed[3:6]) == sorted(placed[6:]) == [0, 1, 2]


def test_ties_are_broken_by_the_seed() -> None:
    first = [Conductor(4, 8, seed=7), Conductor(4, 8, seed=7)]
    for book in first:
        for index in range(4):
            book.ready(index)
    assert [first[0].place(n) for n in range(8)] == [first[1].place(n) for n in range(8)]


@pytest.mark.behaviour("F-22")
def test_beyond_its_capacity_it_refuses_and_says_the_figures() -> None:
    book = conductor(1, 2)
    book.place(1)
    book.place(2)
    with pytest.raises(Overloaded, match=r"2 requests .* at most 2"):
        book.place(3)
    book.ended(1)
    assert book.place(4) == 0


def test_without_a_ready_decider_nothing_is_placed() -> None:
    book = Conductor(1, 2)
    with pytest.raises(NoDecider):
        book.place(1)


def test_a_lost_decider_gives_its_requests_back_and_gets_no_more() -> None:
    book = conductor(2, 8)
    where = {request: book.place(request) for request in range(6)}
    assert book.lost(0) == [request for request, decider in where.items() if decider == 0]
    assert {book.place(request) for request in (10, 11)} == {1}
    book.ready(0)
    assert book.place(12) == 0


def test_a_request_that_ended_with_its_decider_may_end_again() -> None:
    book = conductor(1, 1)
    book.place(1)
    book.lost(0)
    book.ended(1)
    assert book.live == 0


def test_a_decider_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UnknownDecider, match="0 to 1"):
        conductor(2).ready(2)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["place", "end", "lost", "ready"]), st.integers(0, 9)), max_size=50)
)
def test_the_counts_always_fit_what_is_live(trace: list[tuple[str, int]]) -> None:
    book = conductor(3, 5)
    live: dict[int, int] = {}
    number = 100
    for what, value in trace:
        if what == "place":
            number += 1
            try:
                live[number] = book.place(number)
            except (Overloaded, NoDecider):
                assert len(live) >= 5 or not book.any_ready
        elif what == "end" and live:
            request = sorted(live)[value % len(live)]
            book.ended(request)
            del live[request]
        elif what == "lost":
            lost = book.lost(value % 3)
            assert lost == sorted(request for request, decider in live.items() if decider == value % 3)
            live = {request: decider for request, decider in live.items() if decider != value % 3}
        elif what == "ready":
            book.ready(value % 3)
        assert book.live == len(live) == sum(book.statistics().live)
