"""Turns, medians and ratios: pure functions of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

__all__ = ["Case", "Row", "Run", "rows", "table", "turns"]


class Run(msgspec.Struct, frozen=True):
    """One arm once through one case.

    ``tokens`` were generated in ``seconds``, prompts included, with ``cpu_seconds`` of the arm's processes
    (children included). ``load`` is the machine's load average afterwards. ``error`` is empty when it worked.
    """

    arm: str
    tokens: int = 0
    seconds: float = math.nan
    cpu_seconds: float = math.nan
    load: float = math.nan
    error: str = ""


class Case(msgspec.Struct, frozen=True):
    """``concurrency`` sequences at once; ``ours`` is compared with ``targets``: peer -> ratio to reach."""

    concurrency: int
    ours: str
    targets: dict[str, float]


class Row(msgspec.Struct, frozen=True):
    """Medians of one arm in one case; ``ratio`` is ours over the arm's, of tokens a second.

    ``cpu_ratio`` is the same of tokens a CPU second, which a busy machine disturbs less. ``bytes_per_second``
    is weight bytes times steps a second, at least: prefill counts in the seconds but not in the steps.
    """

    arm: str
    concurrency: int
    runs: int
    tokens_per_second: float
    slowest: float
    fastest: float
    tokens_per_cpu_second: float
    cpu_share: float
    bytes_per_second: float
    ratio: float
    cpu_ratio: float
    target: float
    load: float
    error: str


def turns(arms: Sequence[str], rounds: int) -> list[str]:
    """The order of runs: A B C, C B A, A B C, ...: two passes a round, so that a drift hits all alike."""
    order: list[str] = []
    for _ in range(rounds):
        order += [*arms, *reversed(arms)]
    return order


def rows(case: Case, runs: Sequence[Run], weight_bytes: int) -> list[Row]:
    """A row for each arm of ``runs``, in order of first appearance."""
    good = [run for run in runs if not run.error]
    arms = list(dict.fromkeys(run.arm for run in runs))
    speed = {arm: [run.tokens / run.seconds for run in good if run.arm == arm] for arm in arms}
    thrift = {arm: [run.tokens / run.cpu_seconds for run in good if run.arm == arm] for arm in arms}
    return [
        Row(
            arm=arm,
            concurrency=case.concurrency,
            runs=len(speed[arm]),
            tokens_per_second=_median(speed[arm]),
            slowest=min(speed[arm], default=math.nan),
            fastest=max(speed[arm], default=math.nan),
            tokens_per_cpu_second=_median(thrift[arm]),
            cpu_share=_median([run.cpu_seconds / run.seconds for run in good if run.arm == arm]),
            bytes_per_second=weight_bytes * _median(speed[arm]) / case.concurrency,
            ratio=_median(speed.get(case.ours, [])) / _median(speed[arm]),
            cpu_ratio=_median(thrift.get(case.ours, [])) / _median(thrift[arm]),
            target=case.targets.get(arm, math.nan),
            load=_median([run.load for run in good if run.arm == arm]),
            error=next((run.error for run in runs if run.arm == arm and run.error), ""),
        )
        for arm in arms
    ]


def table(rows: Sequence[Row], ceiling: float) -> str:
    """Markdown; ``ceiling`` is the read bandwidth of the same threads in bytes a second."""
    lines = [
        "| arm | in flight | runs | tok/s, median (min to max) | tok per CPU s | CPU used | GB/s, of ceiling "
        "| ours / arm, tok/s | per CPU s | target | load |",
        "|" + " --- |" * 11,
    ]
    for row in rows:
        cells = [
            row.arm,
            str(row.concurrency),
            str(row.runs),
            f"{row.tokens_per_second:.1f} ({row.slowest:.1f} to {row.fastest:.1f})",
            f"{row.tokens_per_cpu_second:.1f}",
            f"{row.cpu_share:.0%}",
            f"{row.bytes_per_second / 1e9:.2f}, {row.bytes_per_second / ceiling:.0%}",
            f"{row.ratio:.2f}",
            f"{row.cpu_ratio:.2f}",
            "" if math.isnan(row.target) else f">= {row.target:g}",
            f"{row.load:.1f}",
        ]
        lines.append("| " + " | ".join("-" if "nan" in cell else cell for cell in cells) + " |")
    lines += [f"{row.arm}: {row.error}" for row in rows if row.error]
    return "\n".join(lines)


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan
