"""RequestBook: rows that are due count, late ones do not, and every request ends exactly once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.gateway.book import RequestBook
from mstar.gateway.errors import ApiError
from mstar.gateway.request import CANCELLED, DONE, FAILED, Choice, Request
from mstar.gateway.text import TextStream, Vocabulary
from mstar.messages.tokens import ERROR, LENGTH, RUNNING, STOP, RowFailed
from tests.gateway.fake_rank import batch
from tests.gateway.tokens import ByteTokenizer

WORDS = Vocabulary(ByteTokenizer([b"one ", b"two ", b"three ", b"\xf0\x9f", b"\x98\x80"]))
ONE, TWO, THREE, HALF, OTHER_HALF = 1, 2, 3, 4, 5


class Collecting:
    """A sink that takes everything and counts ends."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.reasons: dict[int, list[str]] = {}
        self.ends: list[str] = []

    def flush(self, request: Request) -> None:
        for choice in request.choices:
            delta = choice.take()
            self.text[choice.index] = self.text.get(choice.index, "") + delta.text
            if delta.reason is not None:
                self.reasons.setdefault(choice.index, []).append(delta.reason)
        if request.outcome is not None:
            self.ends.append(request.outcome)


def opened(
    book: RequestBook,
    *ids: int,
    max_tokens: int = 10,
    stops: tuple[str, ...] = (),
    top: int = -1,
    **options: Any,
) -> Request:
    choices = [
        Choice(id, index, TextStream(WORDS, stops), max_tokens=max_tokens, top=top)
        for index, id in enumerate(ids)
    ]
    number = 1000 + ids[0]
    request = Request(number, choices, Collecting(), decider=0, prompt_tokens=7, started=0.0, **options)
    book.open(request)
    return request


def flushed(book: RequestBook) -> None:
    for request in book.take_touched():
        request.sink.flush(request)


def sink(request: Request) -> Collecting:
    assert isinstance(request.sink, Collecting)
    return request.sink


def test_tokens_become_text_and_an_end() -> None:
    book = RequestBook()
    request = opened(book, 1)
    book.apply(batch([1], [0], [ONE], [RUNNING]), 1.0)
    book.apply(batch([1], [1], [TWO], [LENGTH]), 2.0)
    flushed(book)
    assert sink(request).text == {0: "one two "}
    assert sink(request).reasons == {0: ["length"]}
    assert book.take_ended() == [request]
    assert request.outcome == DONE
    assert request.usage == (7, 2)
    assert book.take_aborts() == []


@pytest.mark.behaviour("F-26")
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_k_tokens_are_usage_k_and_length(k: int) -> None:
    book = RequestBook()
    request = opened(book, 1, max_tokens=k)
    for index in range(k):
        book.apply(batch([1], [index], [ONE], [LENGTH if index == k - 1 else RUNNING]), 1.0)
    flushed(book)
    assert sink(request).text == {0: "one " * k}
    assert sink(request).reasons == {0: ["length"]}
    assert request.usage.completion_tokens == k


@pytest.mark.behaviour("F-26")
def test_a_stop_token_is_counted_and_not_shown() -> None:
    book = RequestBook()
    request = opened(book, 1)
    book.apply(batch([1, 1], [0, 1], [ONE, TWO], [RUNNING, STOP]), 1.0)
    flushed(book)
    assert sink(request).text == {0: "one "}
    assert sink(request).reasons == {0: ["stop"]}
    assert request.usage.completion_tokens == 2


@pytest.mark.behaviour("F-26")
def test_a_decider_that_overruns_the_budget_is_stopped_at_it() -> None:
    book = RequestBook()
    request = opened(book, 1, max_tokens=2)
    book.apply(batch([1, 1, 1], [0, 1, 2], [ONE, ONE, ONE], [RUNNING] * 3), 1.0)
    flushed(book)
    assert request.usage.completion_tokens == 2
    assert book.take_aborts() == [(0, 1)]
    assert book.statistics().stale == 1


@pytest.mark.behaviour("F-25")
def test_a_stop_string_ends_with_stop_counts_its_last_token_and_drops_the_row() -> None:
    book = RequestBook()
    request = opened(book, 1, stops=("wo th",))
    book.apply(batch([1, 1, 1], [0, 1, 2], [ONE, TWO, THREE], [RUNNING] * 3), 1.0)
    book.apply(batch([1], [3], [ONE], [RUNNING]), 1.0)
    flushed(book)
    assert sink(request).text == {0: "one t"}
    assert sink(request).reasons == {0: ["stop"]}
    assert request.usage.completion_tokens == 3
    assert book.take_aborts() == [(0, 1)]
    assert book.statistics().stale == 1


@pytest.mark.behaviour("F-25")
def test_a_stop_string_on_the_last_token_of_the_budget_is_a_stop() -> None:
    book = RequestBook()
    request = opened(book, 1, stops=("two",), max_tokens=2)
    book.apply(batch([1, 1], [0, 1], [ONE, TWO], [RUNNING, LENGTH]), 1.0)
    flushed(book)
    assert sink(request).reasons == {0: ["stop"]}
    assert book.take_aborts() == []


@pytest.mark.behaviour("F-23")
def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    book = RequestBook()
    request = opened(book, 1)
    book.apply(batch([1, 1], [0, 1], [ONE, HALF], [RUNNING, LENGTH]), 1.0)
    flushed(book)
    assert sink(request).text == {0: "one \ufffd"}


def test_rows_of_another_attempt_or_an_unknown_sequence_are_dropped_and_counted() -> None:
    book = RequestBook()
    request = opened(book, 1)
    late = batch([1, 9], [0, 0], [ONE, ONE], [RUNNING, RUNNING])
    late.attempt[0] = 1
    book.apply(late, 1.0)
    book.row_failed(RowFailed(9, 0, "unknown"))
    assert book.statistics().stale == 3
    assert request.outcome is None
    assert book.take_touched() == []


@pytest.mark.behaviour("F-19")
@pytest.mark.parametrize("index", [0, 2, 7])
def test_a_gap_or_a_repeat_fails_the_request(index: int) -> None:
    book = RequestBook()
    request = opened(book, 1)
    book.apply(batch([1, 1], [0, index], [ONE, TWO], [RUNNING, RUNNING]), 1.0)
    flushed(book)
    assert request.outcome == FAILED
    assert request.failure is not None
    assert request.failure.status == 500
    assert book.take_aborts() == [(0, 1)]
    assert book.statistics().gaps == 1


def test_a_row_that_fails_ends_all_choices_of_its_request_and_no_other() -> None:
    book = RequestBook()
    request, other = opened(book, 1, 2, 3), opened(book, 4)
    book.apply(batch([1], [0], [ONE], [LENGTH]), 1.0)
    book.row_failed(RowFailed(2, 0, "out of memory", 507))
    flushed(book)
    assert sink(request).ends == [FAILED]
    assert request.failure is not None
    assert request.failure.status == 507
    assert book.take_aborts() == [(0, 2), (0, 3)]
    assert other.outcome is None
    assert book.live == 1


def test_an_error_row_fails_its_request() -> None:
    book = RequestBook()
    request = opened(book, 1)
    book.apply(batch([1], [0], [ONE], [ERROR]), 1.0)
    assert request.outcome == FAILED


def test_cancelling_drops_every_running_sequence_once() -> None:
    book = RequestBook()
    request = opened(book, 1, 2)
    book.apply(batch([1], [0], [ONE], [STOP]), 1.0)
    book.cancel(request)
    book.cancel(request)
    assert book.take_aborts() == [(0, 2)]
    assert request.outcome == CANCELLED
    assert book.take_ended() == [request]


def test_times_go_to_their_observers() -> None:
    first: list[float] = []
    gaps: list[float] = []
    book = RequestBook(on_first=first.append, on_gap=gaps.append)
    opened(book, 1)
    for index, now in enumerate((0.5, 0.75, 1.5)):
        book.apply(batch([1], [index], [ONE], [RUNNING]), now)
    assert first == [0.5]
    assert gaps == [0.25, 0.75]


def scored(token: int, logprob: float, ids: list[int], values: list[float], place: int) -> tuple[int, int]:
    assert logprob == -0.5
    assert ids == [token, token + 1]
    assert values == [-0.5, -1.5]
    return token, place


def test_logprobs_leave_with_the_text_of_their_tokens() -> None:
    book = RequestBook()
    request = opened(book, 1, stops=("two three",), top=2, render=scored)
    choice = request.choices[0]
    taken = []
    for index, token in enumerate((ONE, TWO, ONE, HALF, OTHER_HALF)):
        book.apply(batch([1], [index], [token], [RUNNING], scored=True), 1.0)
        taken.append(choice.take().scores)
    assert taken == [[(ONE, 0)], [], [(TWO, 4), (ONE, 8)], [], [(HALF, 12), (OTHER_HALF, 12)]]


def test_logprobs_of_tokens_behind_a_stop_string_do_not_leave() -> None:
    book = RequestBook()
    request = opened(book, 1, stops=("two",), top=2, render=scored)
    book.apply(batch([1, 1], [0, 1], [ONE, TWO], [RUNNING, RUNNING], scored=True), 1.0)
    assert request.choices[0].take().scores == [(ONE, 0)]


def test_a_native_request_is_told_every_token_the_stop_token_too() -> None:
    book = RequestBook()
    request = opened(book, 1, native=True, top=2, render=scored)
    book.apply(batch([1, 1, 1], [0, 1, 2], [ONE, HALF, TWO], [RUNNING, RUNNING, STOP], scored=True), 1.0)
    delta = request.choices[0].take()
    assert delta.tokens == [ONE, HALF, TWO]
    assert [token for token, _ in delta.scores] == [ONE, HALF, TWO]
    assert delta.text == "one \ufffd"


steps = st.one_of(
    st.tuples(
        st.just("row"), st.integers(1, 8), st.sampled_from([RUNNING, RUNNING, RUNNING, STOP, LENGTH, ERROR])
    ),
    st.tuples(st.just("skip"), st.integers(1, 8), st.integers(1, 3)),
    st.tuples(st.just("late"), st.integers(1, 12), st.just(0)),
    st.tuples(st.just("failed"), st.integers(1, 8), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("lost"), st.just(0), st.just(0)),
)


@pytest.mark.behaviour("F-19")
@settings(deadline=None)
@given(st.lists(steps, max_size=60))
def test_every_request_ends_at_most_once_and_exactly_once_when_all_is_over(
    trace: list[tuple[str, int, int]],
) -> None:
    book = RequestBook()
    requests = [opened(book, *ids, max_tokens=4) for ids in ((1,), (2, 3), (4, 5, 6), (7, 8))]
    due = dict.fromkeys(range(1, 13), 0)
    ended: list[Request] = []
    for kind, which, extra in trace:
        if kind == "row":
            book.apply(batch([which], [due[which]], [ONE], [extra]), 1.0)
            due[which] += 1
        elif kind == "skip":
            book.apply(batch([which], [due[which] + extra], [ONE], [RUNNING]), 1.0)
        elif kind == "late":
            book.apply(batch([which], [0], [ONE], [RUNNING]), 1.0)
        elif kind == "failed":
            book.row_failed(RowFailed(which, 0, "no"))
        elif kind == "cancel":
            book.cancel(requests[which])
        else:
            for request in book.requests:
                book.fail(request, ApiError(500, "lost"), abort=False)
        flushed(book)
        ended += book.take_ended()
    for request in book.requests:
        book.cancel(request)
    flushed(book)
    ended += book.take_ended()
    assert sorted(request.number for request in ended) == sorted(request.number for request in requests)
    for request in requests:
        assert sink(request).ends == [request.outcome]
        assert all(len(reasons) == 1 for reasons in sink(request).reasons.values())
    assert book.statistics().sequences == 0
