"""The long-prompt bench: its two figures, its verdicts, and how it drives a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mstar.client.types import Chunk
from mstar.simulation.figures import Answer
from mstar.simulation.workloads import Workload
from tools.bench.long_prompt.__main__ import shapes
from tools.bench.long_prompt.compare import Run, longest_gap, short_ttft, table, verdicts
from tools.bench.long_prompt.drive import drive
from tools.bench.long_prompt.plot import plot


def stream(*events: float) -> Answer:
    return Answer("32", 32, 0.0, events[-1], list(events))


def burst(sent: float, *events: float) -> Answer:
    return Answer("burst", 2000, sent, events[-1], list(events))


def test_the_longest_gap_is_that_of_a_stream_while_the_wave_was_there() -> None:
    streams = [stream(1, 4, 5, 7, 7.5, 19), stream(1.5, 4.5, 5.25, 6, 8.5, 10)]
    assert longest_gap([*streams, burst(4.6, 8.0, 9.0)]) == 11.5  # it began while the wave was there
    assert longest_gap([*streams, burst(4.6, 6.0, 7.0)]) == 2.5
    assert longest_gap([stream(1, 4), burst(2.0, 3.0)]) == 3


def test_the_ttft_of_short_prompts_is_their_median() -> None:
    shorts = [Answer("short", 32, 1.0, 9.0, [1.0 + wait]) for wait in (1.0, 2.0, 6.0)]
    assert short_ttft([*shorts, burst(0.0, 50.0)]) == 2.0


def runs() -> list[Run]:
    made = []
    for budget, seconds in (("off", 8.0), ("128", 0.9), ("128", 1.1), ("off", 10.0)):
        made.append(
            Run(budget, "long-beside-decodes", seconds, answers=[stream(1, 2, 3.5), burst(2.5, 3.0, 4.0)])
        )
    made.append(Run("off", "long-beside-decodes", 0.0, "it failed"))
    return made


def test_verdicts_are_medians_beside_predictions_and_ratios() -> None:
    told = {("off", "long-beside-decodes"): 9.9, ("128", "long-beside-decodes"): 0.7}
    off, chunked = verdicts(runs(), told)
    assert (off.measured, off.least, off.most, off.turns) == (9.0, 8.0, 10.0, 2)
    assert off.off_by == pytest.approx(0.1)
    assert off.told
    assert chunked.measured == 1.0
    assert chunked.off_by == pytest.approx(-0.3)
    assert not chunked.told
    assert (chunked.better, chunked.predicted_better) == (9.0, pytest.approx(9.9 / 0.7))
    text = table([off, chunked])
    assert "Not told within 20%: longest decode gap at 128 is -30% off." in text
    assert "With chunks every figure is at least 3 times better than without." in text


def test_a_figure_that_chunks_hardly_better_is_named() -> None:
    made = [
        Run("off", "long-beside-decodes", 2.0),
        Run("256", "long-beside-decodes", 1.0),
    ]
    told = {(run.budget, run.workload): run.seconds for run in made}
    text = table(verdicts(made, told))
    assert "Less than 3 times better than without chunks: longest decode gap at 256: 2.0." in text
    assert "All told within 20%." in text


def test_the_grid_has_the_chunks_of_every_arm_and_the_whole_prompts() -> None:
    grid = shapes(["off", "128", "256"])
    mixed = [shape for shape in grid if len(shape) == 9]
    assert {128, 256} <= {sum(row.query for row in shape) for shape in mixed}
    assert {1500, 2000} <= {shape[-1].query for shape in mixed}


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    told = {("off", "long-beside-decodes"): 9.9, ("128", "long-beside-decodes"): 0.7}
    plot(runs()[:4], runs()[:2], verdicts(runs(), told), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


class FakeStream:
    """Gives one token at a time, as often as its turn comes, and ends when cancelled."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    async def batch(self) -> list[Chunk]:
        await asyncio.sleep(0)
        if self.left < 1:
            return []
        self.left -= 1
        return [Chunk(0, " the", tokens=(7,))]

    def cancel(self) -> None:
        self.left = 0


class FakeClient:
    """Remembers what it was asked."""

    def __init__(self, short: int = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self._short = short

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return (5, 7)

    async def generate(self, prompt: list[int], **fields: Any) -> FakeStream:
        self.asked.append({"prompt": prompt} | fields)
        return FakeStream(fields["max_tokens"] - self._short)


LOAD = Workload("toy", 2, ((1, 20, 20, 5000),), 2, waves=(("burst", 3, 50, 50, 4, 0.001),))


async def test_a_wave_is_sent_when_the_streams_decode_and_they_are_cut_off_after_it() -> None:
    client = FakeClient()
    answers = await drive(client, LOAD, 0, range(10, 99))  # type: ignore[arg-type]
    streams, wave = answers[:2], answers[2:]
    assert [answer.error for answer in answers] == [""] * 5
    assert min(answer.sent for answer in wave) >= max(answer.events[0] for answer in streams)
    assert [len(answer.events) for answer in wave] == [4, 4, 4]
    assert all(4 < len(answer.events) < 5000 for answer in streams)
    assert all(9 < id < 99 for one in client.asked for id in one["prompt"])
    assert [len(one["prompt"]) for one in client.asked] == [16, 20, 20, 50, 50, 50]
    assert all(one["logit_bias"] == {"7": 100} and one["ignore_eos"] for one in client.asked)


async def test_an_answer_that_ends_early_is_an_error() -> None:
    answers = await drive(FakeClient(short=1), LOAD, 0, range(10, 99))  # type: ignore[arg-type]
    assert "3 tokens came instead of 4" in {answer.error for answer in answers if answer.group == "burst"}
