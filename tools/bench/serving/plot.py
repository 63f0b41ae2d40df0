"""A picture of reports: what share of first tokens and of token gaps came within a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.bench.serving.report import Report

__all__ = ["plot"]


def plot(reports: Sequence[Report], path: Path) -> None:
    """Write a PNG to ``path``: cumulative TTFT, cumulative ITL and tokens per second over the run.

    Raises ImportError when matplotlib is not installed (the extra ``bench`` has it).
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (first, gaps, rate) = pyplot.subplots(1, 3, figsize=(15, 4.5), constrained_layout=True)
    for report in reports:
        good = [exchange for exchange in report.exchanges if not exchange.error]
        label = f"{report.label}, {report.workload.name}"
        _cumulative(first, [one.ttft for one in good if one.ttft is not None], label)
        _cumulative(gaps, [gap for one in good for gap in one.token_gaps], label)
        events = sorted(event for one in good for event in one.events)
        if events:
            begun = min(one.sent for one in good)
            rate.hist([event - begun for event in events], bins=60, histtype="step", label=label)
    for axes, title in ((first, "time to first token, ms"), (gaps, "gap between tokens, ms")):
        axes.set(title=title, ylabel="share", xscale="log")
        axes.grid(alpha=0.3)
    rate.set(title="token events over the run (60 bins)", xlabel="seconds")
    first.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cumulative(axes, seconds: list[float], label: str) -> None:  # type: ignore[no-untyped-def]
    ordered = sorted(second * 1e3 for second in seconds)
    if ordered:
        axes.step(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], label=label)
