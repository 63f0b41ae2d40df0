"""Token gaps over time and first tokens of short prompts, an arm a colour, beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.long_prompt.compare import Run, Verdict

__all__ = ["plot"]


def plot(runs: Sequence[Run], predicted: Sequence[Run], made: Sequence[Verdict], path: Path) -> None:
    """Write a PNG to ``path``. Raises ImportError without matplotlib (the extra ``bench`` has it)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    (gaps, told_gaps), (bars, firsts) = figure.subplots(2, 2)
    told_gaps.sharex(gaps)
    told_gaps.sharey(gaps)
    budgets = list(dict.fromkeys(run.budget for run in runs))
    colours = {budget: f"C{place}" for place, budget in enumerate(budgets)}
    for axes, some, title in ((gaps, runs, "measured"), (told_gaps, predicted, "predicted")):
        _gaps(axes, [run for run in some if run.workload == "long-beside-decodes"], colours)
        axes.set(title=f"gaps of 8 streams around a prompt of 2,000 tokens, {title}")
    _firsts(firsts, [run for run in runs if run.workload == "short-burst"], colours, solid=True)
    _firsts(firsts, [run for run in predicted if run.workload == "short-burst"], colours, solid=False)
    firsts.set(title="short prompts behind 4 long ones (dashed: predicted)", xlabel="TTFT, s", ylabel="share")
    _bars(bars, made)
    figure.savefig(path, dpi=110)


def _gaps(axes: Any, runs: Sequence[Run], colours: dict[str, str]) -> None:
    seen: set[str] = set()
    for run in runs:
        if run.budget in seen:
            continue  # the first turn of an arm: two of them would hide each other
        seen.add(run.budget)
        begun = min((answer.sent for answer in run.answers if answer.group == "burst"), default=0.0)
        pairs = [
            (at - begun, gap * 1e3)
            for answer in run.answers
            if answer.group != "burst"
            for at, gap in zip(answer.events[1:], answer.gaps.tolist(), strict=True)
        ]
        label = f"budget {run.budget}"
        axes.plot(*zip(*pairs, strict=True), ".", markersize=3, color=colours[run.budget], label=label)
    axes.set(xlabel="seconds after the prompt was sent", ylabel="gap, ms", yscale="log")
    axes.legend(fontsize="small", markerscale=4)
    axes.grid(alpha=0.3)


def _firsts(axes: Any, runs: Sequence[Run], colours: dict[str, str], *, solid: bool) -> None:
    for budget, colour in colours.items():
        times = sorted(
            answer.ttft
            for run in runs
            if run.budget == budget
            for answer in run.answers
            if answer.group == "short"
        )
        if times:
            shares = [(place + 1) / len(times) for place in range(len(times))]
            axes.step(times, shares, color=colour, linestyle="-" if solid else "--", label=f"budget {budget}")
    axes.grid(alpha=0.3)


def _bars(axes: Any, made: Sequence[Verdict]) -> None:
    for place, one in enumerate(made):
        axes.bar(place - 0.2, one.measured * 1e3, 0.4, color="C0", label="measured" if not place else None)
        axes.bar(place + 0.2, one.predicted * 1e3, 0.4, color="C1", label="predicted" if not place else None)
    names = [f"{'gap' if one.workload != 'short-burst' else 'TTFT'}\n{one.budget}" for one in made]
    axes.set_xticks(range(len(made)), names, fontsize="small")
    axes.set(title="the two figures by budget", ylabel="ms", yscale="log")
    axes.legend(fontsize="small")
