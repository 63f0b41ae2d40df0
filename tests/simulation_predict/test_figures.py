"""Figures: those of the load generator on the same times, and what victims of a wave see."""

from __future__ import annotations

import math
from random import Random

import pytest

from mstar.simulation.figures import Answer, figures_of, victims_of
from tools.bench.serving import figures as measured
from tools.bench.serving.exchange import Exchange


def answers(count: int) -> list[Answer]:
    random = Random(count)
    made = []
    for place in range(count):
        sent = random.uniform(0, 2)
        events, now = [], sent + random.uniform(0.1, 3)
        for _ in range(random.randrange(1, 40)):
            events.append(now)
            now += random.choice([0.01, 0.04, 0.06, 0.3, 1.2])
        made.append(Answer("stream" if place % 3 else "burst", 100 + place, sent, events[-1], events))
    made.append(Answer("stream", 5, 0.0, 0.0, [], error="refused"))
    return made


def exchanges(some: list[Answer]) -> list[Exchange]:
    return [
        Exchange(
            one.group,
            one.sent,
            sent=one.sent,
            ended=one.ended,
            events=one.events,
            prompt_tokens=one.prompt_tokens,
            output_tokens=len(one.events),
            error=one.error,
        )
        for one in some
    ]


@pytest.mark.parametrize("count", [1, 2, 30])
def test_the_figures_are_those_of_the_load_generator(count: int) -> None:
    some = answers(count)
    mine, theirs = figures_of(some), measured.summarise(exchanges(some))
    pairs = [
        (mine.requests, theirs.requests),
        (mine.failed, theirs.failed),
        (mine.ttft_p50, theirs.ttft.p50),
        (mine.ttft_p99, theirs.ttft.p99),
        (mine.itl_p50, theirs.itl.p50),
        (mine.itl_p99, theirs.itl.p99),
        (mine.itl_max, theirs.itl.largest),
        (mine.gaps, theirs.gaps),
        (mine.stalls, theirs.stalls),
        (mine.requests_per_second, theirs.requests_per_second),
        (mine.output_tokens_per_second, theirs.output_tokens_per_second),
    ]
    assert [mine for mine, _ in pairs] == pytest.approx([theirs for _, theirs in pairs], nan_ok=True)


def test_victims_are_those_of_the_load_generator() -> None:
    some = answers(30)
    parts = [one for one in some if one.group == "stream"], [one for one in some if one.group == "burst"]
    for one in parts[1]:
        one.sent += 4.0
        one.events = [event + 4.0 for event in one.events]
    mine = victims_of(*parts)
    theirs = measured.victims(exchanges(parts[0]), exchanges(parts[1]))
    assert mine.requests > 0
    assert (mine.requests, mine.gaps, mine.stalls) == (theirs.requests, theirs.gaps, theirs.stalls)
    assert mine.decode_rate == pytest.approx(theirs.steady_tokens_per_second)
    assert mine.itl_max == pytest.approx(theirs.itl.largest)


def test_without_answers_there_is_nothing_to_count() -> None:
    none = figures_of([])
    assert none.requests == none.gaps == 0
    assert math.isnan(none.ttft_p50)
    assert math.isnan(none.prefill_rate)


def test_prefill_runs_until_the_last_first_token() -> None:
    found = figures_of([Answer("a", 300, 1.0, 9.0, [2.0, 9.0]), Answer("a", 100, 1.0, 3.0, [3.0])])
    assert found.prefill_rate == 200
    assert found.decode_rate == pytest.approx(1 / 7)
