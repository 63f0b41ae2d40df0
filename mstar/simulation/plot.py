"""A prediction as a picture: a timeline in text, and the same as a PNG where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mstar.config.load import ConfigError

if TYPE_CHECKING:
    from mstar.simulation.predict import Prediction

__all__ = ["check_path", "timeline", "write_plot"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDTH = 64

Bins = NDArray[np.float64]


def timeline(prediction: Prediction, width: int = _WIDTH) -> str:
    """What happened over the run, a line of ``width`` blocks for each figure, each with its peak."""
    if prediction.seconds <= 0:
        return ""
    edges = np.linspace(0.0, prediction.seconds, width + 1)
    bin_seconds = prediction.seconds / width
    steps = prediction.steps
    ends = [step.landed for step in steps]
    prefill = _sums(edges, ends, [step.chunk_tokens for step in steps]) / bin_seconds
    events = [event for answer in prediction.answers for event in answer.events]
    output = _sums(edges, events, [1.0] * len(events)) / bin_seconds
    gaps = [
        (a.events[place + 1], gap) for a in prediction.answers for place, gap in enumerate(a.gaps.tolist())
    ]
    longest = _peaks(edges, [at for at, _ in gaps], [gap * 1e3 for _, gap in gaps])
    running = _sums(edges, ends, [step.rows for step in steps])
    count = np.maximum(_sums(edges, ends, [1.0] * len(steps)), 1)
    lines = (
        ("prefill tok/s", prefill, ",.0f"),
        ("output tok/s", output, ",.0f"),
        ("longest gap, ms", longest, ",.1f"),
        ("rows a step", running / count, ".0f"),
    )
    text = [f"{name:16}|{_bars(values)}| peak {values.max():{form}}" for name, values, form in lines]
    end = f"{prediction.seconds:.3g} s"
    text.append(f"{'':16} 0{end:>{width - 1}}")
    return "\n".join(text)


def check_path(path: Path) -> None:
    """Raise ConfigError if no plot can be written to ``path``: better told before a simulation than after."""
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"is in {path.parent}, which is no folder"
        raise ConfigError(f"the plot {path} {reason}; give the path of a PNG file to write")


def write_plot(prediction: Prediction, path: Path) -> None:
    """Write a PNG to ``path``: token gaps, what each step ran, and each request from sending to its end.

    Raises ConfigError when matplotlib is not installed or ``path`` cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"the plot {path} needs matplotlib, which is not installed: pip install 'mstar[plot]', or leave "
            "--plot out and read the text"
        ) from error
    figure = Figure(figsize=(12, 10), layout="constrained")
    gaps, steps, spans = figure.subplots(3, 1, sharex=True)
    figure.suptitle(f"{prediction.workload} predicted for {prediction.cost}, seed {prediction.seed}")
    groups = sorted({answer.group for answer in prediction.answers})
    colours = {group: f"C{place}" for place, group in enumerate(groups)}
    _draw_gaps(gaps, prediction, colours)
    _draw_steps(steps, prediction)
    _draw_spans(spans, prediction, colours)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot {path} cannot be written: {error}") from error


def _draw_gaps(axes: Any, prediction: Prediction, colours: dict[str, str]) -> None:
    for group, colour in colours.items():
        own = [answer for answer in prediction.answers if answer.group == group and len(answer.events) > 1]
        if own:
            times = np.concatenate([np.array(answer.events[1:]) for answer in own])
            values = np.concatenate([answer.gaps for answer in own]) * 1e3
            axes.plot(times, values, ".", markersize=2, color=colour, label=group)
    axes.axhline(50, color="grey", linewidth=0.8, linestyle="--")
    axes.set(ylabel="gap between tokens, ms", yscale="log")
    axes.legend(fontsize="small", markerscale=5)
    axes.grid(alpha=0.3)


def _draw_steps(axes: Any, prediction: Prediction) -> None:
    times = [step.landed for step in prediction.steps]
    axes.fill_between(
        times, [step.chunk_tokens for step in prediction.steps], step="pre", alpha=0.4, label="prefill"
    )
    axes.set(ylabel="prefill tokens a step")
    rows = axes.twinx()
    rows.plot(
        times, [step.decodes for step in prediction.steps], color="C3", linewidth=0.8, drawstyle="steps-pre"
    )
    rows.set(ylabel="decode rows a step")
    axes.grid(alpha=0.3)


def _draw_spans(axes: Any, prediction: Prediction, colours: dict[str, str]) -> None:
    for place, answer in enumerate(sorted(prediction.answers, key=lambda one: one.sent)):
        if answer.events:
            first = answer.events[0]
            axes.plot([answer.sent, first], [place, place], color="lightgrey", linewidth=1.5)
            axes.plot([first, answer.ended], [place, place], color=colours[answer.group], linewidth=1.5)
    axes.set(xlabel="seconds", ylabel="requests, grey until the first token")
    axes.invert_yaxis()


def _sums(edges: Bins, times: Sequence[float], weights: Sequence[float]) -> Bins:
    return np.histogram(times, edges, weights=weights)[0].astype(np.float64)


def _peaks(edges: Bins, times: Sequence[float], values: Sequence[float]) -> Bins:
    found = np.zeros(edges.size - 1)
    places = np.clip(np.searchsorted(edges, times) - 1, 0, found.size - 1)
    np.maximum.at(found, places, values)
    return found


def _bars(values: Bins) -> str:
    peak = values.max()
    if peak <= 0:
        return " " * values.size
    levels = np.ceil(values / peak * (len(_BLOCKS) - 1)).astype(int)
    return "".join(_BLOCKS[level] for level in levels)
