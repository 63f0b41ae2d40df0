from __future__ import annotations

import math
import statistics

import pytest

from tools.bench.serving.exchange import Exchange
from tools.bench.serving.figures import percentile, spread, steady_rate, summarise, victims


def exchange(sent: float, events: list[float], ended: float | None = None, **more) -> Exchange:
    fields = {"group": "640", "due": sent, "sent": sent, "events": events, "output_tokens": len(events)}
    return Exchange(**(fields | {"ended": ended or events[-1]} | more))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_percentiles_are_those_of_the_standard_library(share):
    sample = sorted([3.0, 1.0, 4.0, 1.5, 9.0, 2.6, 5.3])
    expected = statistics.quantiles(sample, n=10, method="inclusive")[round(share * 10) - 1]
    assert percentile(sample, share) == pytest.approx(expected)


def test_an_empty_sample_has_no_figures():
    assert all(math.isnan(value) for value in (spread([]).p50, spread([]).largest, spread([]).mean))


def test_ttft_counts_from_sending_and_itl_between_events():
    figures = summarise([exchange(10.0, [10.5, 10.6, 10.8]), exchange(11.0, [11.1])])
    assert figures.ttft.largest == pytest.approx(0.5)
    assert figures.ttft.mean == pytest.approx(0.3)
    assert figures.itl.largest == pytest.approx(0.2)
    assert figures.itl.mean == pytest.approx(0.15)


def test_rates_run_from_the_first_request_to_the_last_end():
    figures = summarise([exchange(10.0, [11.0, 12.0]), exchange(11.0, [12.0, 13.0, 14.0])])
    assert figures.seconds == 4.0
    assert figures.output_tokens_per_second == 5 / 4
    assert figures.requests_per_second == 2 / 4


def test_gaps_and_stalls_are_raw_intervals_over_50_ms_and_a_second():
    figures = summarise([exchange(0.0, [1.0, 1.04, 1.1, 2.2, 2.24])])
    assert (figures.gaps, figures.stalls) == (2, 1)


def test_an_event_of_several_tokens_counts_as_so_many_gaps():
    one = exchange(0.0, [1.0, 1.3], sizes=[1, 3], output_tokens=4)
    figures = summarise([one])
    assert one.token_gaps == pytest.approx([0.1, 0.1, 0.1])
    assert figures.gaps == 1
    assert figures.events_per_token == 0.5


def test_failures_count_by_error_and_in_no_other_figure():
    bad = exchange(0.0, [90.0], error="503: busy")
    figures = summarise([exchange(10.0, [10.5]), bad, bad])
    assert (figures.requests, figures.failed, figures.errors) == (3, 2, {"503: busy": 2})
    assert figures.ttft.largest == pytest.approx(0.5)


def test_lateness_is_how_far_behind_the_schedule_a_request_left():
    assert summarise([exchange(10.0, [11.0], due=9.75)]).late.largest == 0.25


def test_the_steady_rate_leaves_out_the_ramp_and_the_tail():
    first = exchange(0.0, [5.0, 6.0, 7.0, 8.0])
    second = exchange(8.0, [9.0, 10.0])
    assert steady_rate([first, second]) == 3 / 3
    assert math.isnan(steady_rate([first]))


def test_victims_are_cut_to_the_time_of_the_burst():
    decoding = exchange(0.0, [1.0, 2.0, 3.0, 3.5, 6.0, 6.5, 9.0])
    burst = exchange(3.2, [6.2, 9.9], group="burst")
    figures = victims([decoding], [burst])
    assert figures.itl.largest == pytest.approx(2.5)
    assert figures.stalls == 1
    assert figures.gaps == 2
    assert figures.steady_tokens_per_second == pytest.approx(2 / 3)
