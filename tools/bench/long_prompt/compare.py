"""The two figures, out of answers measured or predicted alike, and the table that sets them side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from mstar.simulation.figures import Answer

__all__ = ["FIGURES", "Run", "Verdict", "longest_gap", "short_ttft", "table", "verdicts"]

FIGURES = {
    "long-beside-decodes": "longest decode gap",
    "short-burst": "TTFT of short prompts, p50",
}
"""By workload what is compared."""

WITHIN = 0.20
TIMES = 3.0
"""The longest gap and the TTFT without chunks are to be this many times those with chunks, at least."""

OFF = "off"


class Run(msgspec.Struct):
    """One turn of one workload: the arm's budget, ``seconds`` is the figure, ``answers`` all of them."""

    budget: str
    workload: str
    seconds: float
    error: str = ""
    answers: list[Answer] = []


class Verdict(msgspec.Struct, frozen=True):
    """An arm in a workload: medians of its turns and their range, and the prediction, in seconds.

    ``off_by`` is predicted over measured, less one. ``better`` is how many times smaller the figure is than
    without chunks.
    """

    budget: str
    workload: str
    measured: float
    least: float
    most: float
    turns: int
    predicted: float
    off_by: float
    better: float
    predicted_better: float

    @property
    def told(self) -> bool:
        """Whether the prediction is close enough."""
        return abs(self.off_by) <= WITHIN


def figure(workload: str, answers: Sequence[Answer]) -> float:
    """What is compared in ``workload``, in seconds."""
    return longest_gap(answers) if workload == "long-beside-decodes" else short_ttft(answers)


def longest_gap(answers: Sequence[Answer]) -> float:
    """The longest gap between two tokens of a stream, while the wave was there."""
    wave = [answer for answer in answers if answer.group == "burst"]
    begun = min(answer.sent for answer in wave)
    over = max(answer.ended for answer in wave)
    longest = math.nan
    for answer in answers:
        if answer.group != "burst" and len(answer.events) > 1:
            events = np.array(answer.events)
            inside = (events[1:] > begun) & (events[:-1] < over)
            longest = np.fmax(longest, max(answer.gaps[inside], default=math.nan))
    return float(longest)


def short_ttft(answers: Sequence[Answer]) -> float:
    """The median TTFT of the short prompts."""
    return median(answer.ttft for answer in answers if answer.group == "short")


def verdicts(runs: Sequence[Run], predicted: Mapping[tuple[str, str], float]) -> list[Verdict]:
    """One for each arm and workload, arms in the order in which they first came.

    ``predicted`` gives seconds by (budget, workload).
    """
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if not run.error:
            found.setdefault((run.budget, run.workload), []).append(run.seconds)
    made = []
    for (budget, workload), seconds in sorted(found.items(), key=lambda item: item[0][1]):
        measured, told = median(seconds), predicted[budget, workload]
        whole = found.get((OFF, workload))
        made.append(
            Verdict(
                budget=budget,
                workload=workload,
                measured=measured,
                least=min(seconds),
                most=max(seconds),
                turns=len(seconds),
                predicted=told,
                off_by=told / measured - 1,
                better=median(whole) / measured if whole else math.nan,
                predicted_better=predicted[OFF, workload] / told if whole else math.nan,
            )
        )
    return made


def table(made: Sequence[Verdict]) -> str:
    """Markdown, then a sentence for what was to be shown and was not."""
    lines = [
        "| figure | budget | turns | measured ms (min to max) | predicted ms | off by "
        "| times better than off | predicted |",
        "|" + "---|" * 8,
    ]
    lines += [
        f"| {FIGURES[one.workload]} | {one.budget} | {one.turns} "
        f"| {one.measured * 1e3:.0f} ({one.least * 1e3:.0f} to {one.most * 1e3:.0f}) "
        f"| {one.predicted * 1e3:.0f} | {one.off_by:+.0%} | {one.better:.1f} | {one.predicted_better:.1f} |"
        for one in made
    ]
    missed = [
        f"{FIGURES[one.workload]} at {one.budget} is {one.off_by:+.0%} off" for one in made if not one.told
    ]
    lines.append("")
    lines.append(
        f"Not told within {WITHIN:.0%}: {'; '.join(missed)}." if missed else f"All told within {WITHIN:.0%}."
    )
    poor = [
        f"{FIGURES[one.workload]} at {one.budget}: {one.better:.1f}"
        for one in made
        if one.budget != OFF and one.better < TIMES
    ]
    lines.append(
        f"Less than {TIMES:.0f} times better than without chunks: {'; '.join(poor)}."
        if poor
        else f"With chunks every figure is at least {TIMES:.0f} times better than without."
    )
    return "\n".join(lines)
