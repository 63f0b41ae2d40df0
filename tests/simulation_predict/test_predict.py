"""Predictions: the same for the same seed, true to their own events, and sensitive to what they should be."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mstar.config.load import ConfigError, resolve
from mstar.simulation.cost import CostTable, Host, ModelFacts
from mstar.simulation.plot import timeline, write_plot
from mstar.simulation.predict import Prediction, predict
from mstar.simulation.presets import preset
from mstar.simulation.setting import setting_of
from mstar.simulation.workloads import named

TOKEN_BYTES = 46_080
CPU = CostTable(
    ModelFacts("toy", 4096, TOKEN_BYTES),
    tokens=(1, 64, 2048),
    tokens_ns=(20e6, 200e6, 6e9),
    row_ns=5e6,
    read_ns=2e3,
    past_ns=1e3,
    own_ns=1e3,
    host=Host(step_ns=100_000, row_ns=1_000, submit_ns=2e6, submit_token_ns=1e3, deliver_ns=1e6, inline=True),
)


def run(
    workload: str, seed: int = 0, requests: int | None = None, cost: Any = CPU, **flags: Any
) -> Prediction:
    setting = setting_of(resolve(None, {}, {"max_num_seqs": 16} | flags), cost.model)
    return predict(setting, named(workload, requests), cost, seed=seed)


known = cache(run)
"""The same, run once: for tests that only look."""


def plain(prediction: Prediction) -> bytes:
    return msgspec.json.encode(prediction)


@pytest.mark.parametrize("workload", ["closed-2", "rate-2"])
def test_a_seed_gives_the_same_prediction_again(workload: str) -> None:
    first = run(workload, requests=3)
    assert plain(run(workload, requests=3)) == plain(first)


def test_another_seed_gives_another_prediction() -> None:
    assert plain(run("rate-2", seed=1, requests=2)) != plain(run("rate-2", seed=2, requests=2))


@pytest.mark.parametrize(
    ("workload", "requests"), [("closed-3", 5), ("rate-2", 3), ("long-beside-decodes", 8)]
)
def test_the_figures_agree_with_events_and_steps(workload: str, requests: int) -> None:
    found = known(workload, requests=requests)
    total = found.figures["all"]
    assert total.requests == len(found.answers) == requests + (workload == "long-beside-decodes")
    assert total.failed == found.refused == 0
    assert all(answer.events[0] > answer.sent for answer in found.answers)
    assert all(answer.events == sorted(answer.events) for answer in found.answers)
    tokens = sum(len(answer.events) for answer in found.answers)
    gaps = [gap for answer in found.answers for gap in np.diff(answer.events)]
    assert total.itl_max == pytest.approx(max(gaps))
    assert total.gaps == sum(gap > 0.05 for gap in gaps)
    assert total.output_tokens_per_second == pytest.approx(tokens / total.seconds)
    # Every prompt token ran once, and every token came from a decode or from a prompt's end.
    assert sum(step.chunk_tokens for step in found.steps) == sum(one.prompt_tokens for one in found.answers)
    assert sum(step.decodes for step in found.steps) >= tokens - len(found.answers)
    assert found.seconds == max(answer.ended for answer in found.answers)
    assert 0 < found.pages_peak <= found.pages_total


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    found = known("closed-3", requests=5)
    for answer in found.answers:
        live = [one for one in found.answers if one.sent <= answer.sent < one.ended]
        assert len(live) <= 3
    assert sum(answer.sent == 0 for answer in found.answers) == 3


def test_a_wave_comes_when_every_stream_has_shown_a_token() -> None:
    found = known("long-beside-decodes", requests=8)
    streams, (burst,) = found.answers[:8], found.answers[8:]
    assert burst.sent == pytest.approx(max(stream.events[0] for stream in streams), abs=1e-5)
    assert found.figures["victims"].requests == 8


def test_a_smaller_budget_never_makes_the_longest_gap_longer() -> None:
    budgets = ["off", 256, 64]
    longest = [
        run("long-beside-decodes", 0, 4, max_batch_tokens=budget, min_chunk_tokens=16)
        .figures["victims"]
        .itl_max
        for budget in budgets
    ]
    assert longest == sorted(longest, reverse=True)
    assert longest[0] > 3 * longest[-1]


def test_chunks_let_short_prompts_pass_a_burst_of_long_ones() -> None:
    whole, chunked = (
        run("short-burst", 0, 1, max_batch_tokens=budget, min_chunk_tokens=16).figures["short"].ttft_p50
        for budget in ("off", 128)
    )
    assert whole > 3 * chunked


def test_a_target_gap_is_kept_where_the_decodes_leave_room_for_it() -> None:
    free, aimed = (
        run("long-beside-decodes", 0, 4, max_batch_tokens=1024, min_chunk_tokens=16, target_itl_ms=target)
        for target in (None, 400.0)
    )
    assert free.figures["victims"].itl_max > 0.8
    assert aimed.figures["victims"].itl_p99 < 0.4


def test_two_ranks_prefill_faster_and_give_the_same_tokens() -> None:
    cost = preset("h200-qwen3-8b")
    one, two = (
        run("closed-4", requests=4, cost=cost, tensor_parallel_size=ranks, max_num_seqs=8) for ranks in (1, 2)
    )
    assert [len(answer.events) for answer in one.answers] == [len(answer.events) for answer in two.answers]
    assert two.figures["all"].ttft_p50 < 0.7 * one.figures["all"].ttft_p50


def test_few_pages_are_counted_as_preemptions() -> None:
    found = run("long-beside-decodes", kv_cache_bytes=TOKEN_BYTES * 16 * 150, max_seq_len=2048)
    assert found.preempted > 0
    assert 140 < found.pages_peak <= found.pages_total == 150
    assert found.figures["all"].failed == 0


def test_the_peer_that_was_measured_on_an_h200_is_met_by_the_preset() -> None:
    found = run("mixed-8x16k", cost=preset("h200-qwen3-8b"), max_batch_tokens=2048, max_num_seqs=64)
    victims = found.figures["victims"]
    assert victims.itl_p50 == pytest.approx(63.8e-3, rel=0.1)
    assert victims.itl_p99 == pytest.approx(84e-3, rel=0.1)
    assert found.figures["burst"].prefill_rate == pytest.approx(30_700, rel=0.1)


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="window holds 4096"):
        run("burst-8")


def test_progress_ends_with_every_token() -> None:
    told: list[tuple[int, int]] = []
    setting = setting_of(resolve(None, {}, {}), CPU.model)
    predict(setting, named("closed-2", 2), CPU, progress=lambda done, due: told.append((done, due)))
    assert told[-1] == (512, 512)


def test_the_timeline_has_a_line_for_each_figure_as_wide_as_asked() -> None:
    found = known("long-beside-decodes", requests=8)
    *lines, axis = timeline(found, 30).splitlines()
    assert [line.partition("|")[0].strip() for line in lines] == [
        "prefill tok/s",
        "output tok/s",
        "longest gap, ms",
        "rows a step",
    ]
    assert {len(line.split("|")[1]) for line in lines} == {30}
    assert all("█" in line for line in lines)
    assert axis.endswith(f"{found.seconds:.3g} s")
    assert f"peak {found.figures['victims'].itl_max * 1e3:,.1f}" in lines[2]


def test_a_plot_is_a_png_and_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    found = known("closed-3", requests=5)
    write_plot(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_plot(found, tmp_path / "none" / "plot.png")


def test_without_matplotlib_the_plot_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="needs matplotlib"):
        write_plot(known("closed-3", requests=5), tmp_path / "plot.png")
