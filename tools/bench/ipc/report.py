"""Percentiles, the table, the verdict on the claim, the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tools.bench.ipc.tasks import Sample

__all__ = ["Row", "plot", "ratios", "summarise", "table"]

_CLEAN_NS = 50_000
_UNITS = {"message": "bytes", "step": "rows"}


class Row(msgspec.Struct, frozen=True):
    """One transport and size, in us. `clean`: only samples in which threads queued up to 50 us for a core."""

    what: str
    size: int
    transport: str
    samples: int
    p50: float
    p99: float
    p999: float
    clean_p50: float | None
    clean_p99: float | None
    clean_share: float
    one_way_p50: float | None
    one_way_p99: float | None
    queued_p99: float


def summarise(what: str, size: int, transport: str, samples: list[Sample]) -> Row:
    data = np.array(samples, dtype=np.float64).reshape(-1, 3)
    clean = data[data[:, 2] <= _CLEAN_NS]
    one_way = what == "message"
    return Row(
        what=what,
        size=size,
        transport=transport,
        samples=len(data),
        p50=_us(data[:, 0], 50),
        p99=_us(data[:, 0], 99),
        p999=_us(data[:, 0], 99.9),
        clean_p50=_us(clean[:, 0], 50) if len(clean) else None,
        clean_p99=_us(clean[:, 0], 99) if len(clean) else None,
        clean_share=round(len(clean) / len(data), 3),
        one_way_p50=_us(data[:, 1], 50) if one_way else None,
        one_way_p99=_us(data[:, 1], 99) if one_way else None,
        queued_p99=_us(data[:, 2], 99),
    )


def _us(values: Any, percentile: float) -> float:
    return round(float(np.percentile(values, percentile)) / 1000, 2)


def table(rows: list[Row]) -> str:
    """All of it as text, a line per transport and size, in microseconds."""
    names = ("p50", "p99", "p99.9", "clean p50", "clean p99", "share", "one p50", "one p99", "queued p99")
    lines = [f"{'':8} {'size':>8} {'transport':<10} " + " ".join(f"{name:>10}" for name in names) + "  (us)"]
    for row in rows:
        figures = (
            row.p50,
            row.p99,
            row.p999,
            row.clean_p50,
            row.clean_p99,
            row.clean_share,
            row.one_way_p50,
            row.one_way_p99,
            row.queued_p99,
        )
        cells = " ".join(f"{'-' if figure is None else format(figure, '.1f'):>10}" for figure in figures)
        lines.append(f"{row.what:8} {row.size:>8} {row.transport:<10} {cells}")
    return "\n".join(lines)


def ratios(rows: list[Row]) -> dict[str, float]:
    """zmq over our hot ring for the 48-row step: raw figures of both, then our clean p99 under zmq's raw one.

    zmq's own threads wait for the cores that the processes use, so only its raw figures are fair to it.
    """
    found = {row.transport: row for row in rows if row.what == "step" and row.size == 48}
    if not {"ring hot", "zmq"} <= found.keys():
        return {}
    ours, theirs = found["ring hot"], found["zmq"]
    return {
        "p50": round(theirs.p50 / ours.p50, 1),
        "p99": round(theirs.p99 / ours.p99, 1),
        "p99_ours_clean": round(theirs.p99 / (ours.clean_p99 or ours.p99), 1),
    }


def plot(rows: list[Row], path: Path) -> bool:
    """Bars of p50 and lines to p99, a panel for messages, one for steps; False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot

    kinds = [(what, unit) for what, unit in _UNITS.items() if any(row.what == what for row in rows)]
    figure, panels = pyplot.subplots(1, len(kinds), figsize=(6 * len(kinds), 5), squeeze=False)
    for panel, (what, unit) in zip(panels[0], kinds, strict=True):
        chosen = [row for row in rows if row.what == what]
        sizes = sorted({row.size for row in chosen})
        names = list(dict.fromkeys(row.transport for row in chosen))
        width = 0.8 / max(1, len(names))
        for i, name in enumerate(names):
            own = sorted((row for row in chosen if row.transport == name), key=lambda row: row.size)
            at = [sizes.index(row.size) + i * width for row in own]
            p50, p99 = [row.p50 for row in own], [max(row.p99, row.p50) for row in own]
            bars = panel.bar(at, p50, width, label=name)
            panel.vlines(at, p50, p99, color=bars.patches[0].get_facecolor(), linewidth=2)
        panel.set_yscale("log")
        panel.set_xticks([i + 0.4 - width / 2 for i in range(len(sizes))], [str(size) for size in sizes])
        panel.set_xlabel(unit)
        panel.set_ylabel("round trip, us (bar: p50, line: up to p99)")
        panel.set_title(
            "message out, 200 B back" if what == "message" else "step and its tokens, codec included"
        )
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
