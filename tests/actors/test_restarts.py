"""The restart policy on a clock of its own."""

from __future__ import annotations

from actors.restarts import RestartBook, RestartPolicy

POLICY = RestartPolicy(limit=4, delay=0.5, factor=2.0, longest=3.0, settled=60.0)


def test_deaths_in_a_row_wait_longer_each_time_and_are_given_up_at_the_limit() -> None:
    book = RestartBook(POLICY)
    assert [book.died(float(now)) for now in range(5)] == [0.5, 1.0, 2.0, 3.0, None]
    assert (book.deaths, book.restarts) == (5, 4)


def test_a_cell_that_was_ready_for_long_starts_counting_anew() -> None:
    book = RestartBook(POLICY)
    for now in range(4):
        book.died(float(now))
    book.ready(10.0)
    assert book.died(70.0) == 0.5


def test_a_cell_that_was_ready_only_briefly_does_not() -> None:
    book = RestartBook(POLICY)
    book.died(0.0)
    book.ready(10.0)
    assert book.died(69.0) == 1.0


def test_deaths_before_the_cell_is_ready_again_count_although_it_was_healthy_once() -> None:
    book = RestartBook(POLICY)
    book.ready(0.0)
    assert [book.died(now) for now in (100.0, 200.0, 300.0)] == [0.5, 1.0, 2.0]
