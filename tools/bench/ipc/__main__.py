"""Measure, print, write: `python -m tools.bench.ipc --json tools/bench/results/ipc.json --plot ipc.png`."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec

from tools.bench.ipc.peer import loop_factory
from tools.bench.ipc.report import Row, plot, ratios, summarise, table
from tools.bench.ipc.session import TRANSPORTS, Plan, session
from tools.bench.ipc.tasks import Sample

_TASKS = (("messages", "message"), ("steps", "step"))


def _run(plan: Plan, rounds: int) -> list[Row]:
    samples: dict[tuple[str, int, str], list[Sample]] = {}
    for number in range(rounds):
        for transport in plan.transports:
            for task, what in _TASKS:
                with asyncio.Runner(loop_factory=lambda: loop_factory(plan.loop)) as runner:
                    found = runner.run(session(plan, transport, task))
                for size, values in found.items():
                    samples.setdefault((what, size, transport), []).extend(values)
        print(f"round {number + 1} of {rounds} done, {_pressure()}", file=sys.stderr, flush=True)
    order = sorted(samples, key=lambda key: (key[0], key[1], plan.transports.index(key[2])))
    return [summarise(*key, samples[key]) for key in order]


def _pressure() -> str:
    try:
        return "cpu pressure: " + Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return "cpu pressure unknown"


def _machine(plan: Plan) -> dict[str, str | int]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].split(":", 1)[1].strip() if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "loop": plan.loop,
        "pyzmq": version("pyzmq"),
        "numpy": version("numpy"),
        "pressure": _pressure(),
    }


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _plan(arguments: list[str] | None) -> tuple[Plan, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.ipc", description=__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add("--samples", type=int, default=2000, help="a round, transport and size")
    add("--sizes", type=_numbers, default=(200, 2048, 65536, 1 << 20), help="bytes, with commas")
    add("--rows", type=_numbers, default=(48, 256, 1024), help="rows of a step, with commas")
    add("--transports", default=",".join(TRANSPORTS))
    loop = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"
    add("--loop", choices=("uvloop", "asyncio"), default=loop, help="for every transport")
    add("--no-pin", action="store_true", help="do not give each process a core of its own")
    add("--json", type=Path)
    add("--plot", type=Path)
    options = parser.parse_args(arguments)
    chosen = tuple(options.transports.split(","))
    unknown = [name for name in chosen if name not in TRANSPORTS]
    if unknown:
        parser.error(f"unknown transport {unknown[0]!r}: allowed are {', '.join(TRANSPORTS)}")
    pin = not options.no_pin and len(os.sched_getaffinity(0)) > 1
    return Plan(chosen, options.sizes, options.rows, options.samples, options.loop, pin), options


def main(arguments: list[str] | None = None) -> int:
    plan, options = _plan(arguments)
    rows = _run(plan, options.rounds)
    machine, found = _machine(plan), ratios(rows)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(table(rows))
    if found:
        print(
            f"zmq over ring hot, step of 48 rows: p50 {found['p50']}x (target 20), p99 {found['p99']}x "
            f"(target 10), p99 without samples of ours that queued for a core {found['p99_ours_clean']}x"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine, "zmq_over_ring_hot_48_rows": found, "rows": rows}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    if options.plot and not plot(rows, options.plot):
        print("no plot: matplotlib is not installed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
