"""A run's figures as JSON and as a table for a terminal or a page."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import msgspec

from tools.bench.serving.exchange import Exchange
from tools.bench.serving.figures import Figures, Spread, summarise, victims
from tools.bench.serving.workload import Workload

__all__ = ["Report", "as_json", "make_report", "table"]

SATURATED = 0.7  # of one core: beyond it the client itself delays what it measures


class Report(msgspec.Struct):
    """One run of one workload. ``client_cpu`` is CPU seconds of the client per second of the run."""

    label: str
    workload: Workload
    figures: dict[str, Figures]
    client_cpu: float
    load: tuple[float, float, float]
    machine: str
    exchanges: list[Exchange]

    @property
    def saturated(self) -> bool:
        """Whether the client was too busy to be believed."""
        return self.client_cpu > SATURATED


def make_report(label: str, workload: Workload, exchanges: Sequence[Exchange], client_cpu: float) -> Report:
    """Figures of all exchanges, of each group where there are several, and of a burst's victims."""
    figures = {"all": summarise(exchanges)}
    groups = sorted({exchange.group for exchange in exchanges})
    if len(groups) > 1:
        parts = {name: [one for one in exchanges if one.group == name] for name in groups}
        figures |= {name: summarise(part) for name, part in parts.items()}
        if "burst" in parts:
            others = [one for one in exchanges if one.group != "burst"]
            figures["victims"] = victims(others, parts["burst"])
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return Report(label, workload, figures, client_cpu, os.getloadavg(), machine, list(exchanges))


def table(reports: Sequence[Report]) -> str:
    """Markdown: a line for each group of each report. Times in milliseconds."""
    head = [
        "server",
        "workload",
        "requests",
        "failed",
        "tok/s",
        "steady tok/s",
        "req/s",
        "TTFT p50 / p90 / p99",
        "ITL p50 / p90 / p99 / max",
        "gaps",
        "stalls",
        "client CPU",
    ]
    lines = [_line(head), _line(["---"] * len(head))]
    for report in reports:
        for group, figures in report.figures.items():
            lines.append(_line(_cells(report, group, figures)))
    warnings = [_warning(report) for report in reports if report.saturated]
    errors = [
        f"{report.label}, {report.workload.name}: {count} x {error}"
        for report in reports
        for error, count in report.figures["all"].errors.items()
    ]
    return "\n".join(lines + warnings + errors)


def as_json(reports: Sequence[Report]) -> bytes:
    """The reports with every exchange; a figure that does not exist is null."""
    plain: Any = msgspec.to_builtins(list(reports))
    return msgspec.json.format(msgspec.json.encode(plain), indent=1)


def _cells(report: Report, group: str, figures: Figures) -> list[str]:
    name = report.workload.name if group == "all" else f"{report.workload.name}: {group}"
    return [
        report.label,
        name,
        str(figures.requests),
        str(figures.failed),
        f"{figures.output_tokens_per_second:.1f}",
        f"{figures.steady_tokens_per_second:.1f}",
        f"{figures.requests_per_second:.2f}",
        _milliseconds(figures.ttft, ("p50", "p90", "p99")),
        _milliseconds(figures.itl, ("p50", "p90", "p99", "largest")),
        str(figures.gaps),
        str(figures.stalls),
        f"{report.client_cpu:.0%}",
    ]


def _milliseconds(values: Spread, names: Sequence[str]) -> str:
    return " / ".join(f"{getattr(values, name) * 1e3:.1f}" for name in names)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _warning(report: Report) -> str:
    return (
        f"{report.label}, {report.workload.name}: the client used {report.client_cpu:.0%} of a core; "
        f"above {SATURATED:.0%} its own delays are in these figures."
    )
