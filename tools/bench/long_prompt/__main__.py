"""`python -m tools.bench.long_prompt`: turns of every arm, costs in between, predictions, one table."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mstar.cli.table import ProgressLine
from mstar.client.aio import AsyncClient
from mstar.config.load import Resolved, resolve
from mstar.model.files import resolve as resolve_model
from mstar.simulation.cost import Cost, encode_cost
from mstar.simulation.figures import Answer
from mstar.simulation.predict import predict
from mstar.simulation.setting import setting_of
from mstar.simulation.workloads import named
from tools.bench.long_prompt import __doc__ as purpose
from tools.bench.long_prompt.compare import FIGURES, Run, figure, table, verdicts
from tools.bench.long_prompt.drive import drive
from tools.bench.long_prompt.plot import plot
from tools.bench.long_prompt.server import Server, ServerFailed
from tools.bench.peers.compare import turns
from tools.bench.step_cost import Calibration, Row, Shape, StepTimer, calibrated
from tools.bench.step_cost import table as cost_table

SLOTS, WINDOW, PAGE = 16, 2560, 16
LONGEST = 2000


def settings(budget: str, options: argparse.Namespace) -> dict[str, str]:
    """The deployment of an arm, by setting."""
    return {
        "max_batch_tokens": budget,
        "min_chunk_tokens": str(options.min_chunk_tokens),
        "max_num_seqs": str(SLOTS),
        "max_seq_len": str(WINDOW),
        "page_size": str(PAGE),
        "pipeline_depth": str(options.depth),
        "dtype": options.dtype,
        "threads": str(options.threads),
    }


FLAGS = {
    "max_batch_tokens": "--max-num-batched-tokens",
    "min_chunk_tokens": "--min-chunk-tokens",
    "max_num_seqs": "--max-num-seqs",
    "max_seq_len": "--max-model-len",
    "page_size": "--block-size",
    "pipeline_depth": "--pipeline-depth",
    "dtype": "--dtype",
    "threads": "--threads",
}


def shapes(budgets: Sequence[str]) -> list[Shape]:
    """Steps of the kinds that the workloads run: decodes, and chunks of the arms' sizes beside them."""
    decodes = [(Row(1, length),) * rows for rows in (1, 4, 8, 12) for length in (64, 400)]
    sizes = sorted({32, 512, *(int(budget) for budget in budgets if budget != "off")})
    beside = (Row(1, 100),) * 8
    chunks = [
        (*beside, Row(size - len(beside), length))
        for size in sizes
        for length in (size, LONGEST // 2, LONGEST)
        if len(beside) < size <= length
    ]
    whole = [(*beside, Row(size, size)) for size in (1500, LONGEST)]
    split = [(*beside, *(Row(max(size // 4, 1), 800),) * 4) for size in sizes if size >= 64]
    return [*decodes, *chunks, *whole, *split, (Row(256, 256),), (Row(LONGEST, LONGEST),)]


def turn(budget: str, options: argparse.Namespace, seed: int, ids: range) -> list[Run]:
    """A fresh daemon for ``budget``, and every workload once, with prompts out of ``ids``."""
    flags = [part for name, value in settings(budget, options).items() for part in (FLAGS[name], value)]
    flags.append("--no-enable-prefix-caching")
    with tempfile.TemporaryDirectory(prefix="long-") as folder:
        with Server(options.model, flags, Path(folder)) as server:
            return [measured(server, budget, workload, seed, ids) for workload in options.workload]


def measured(server: Server, budget: str, workload: str, seed: int, ids: range) -> Run:
    answers = asyncio.run(asked(server, workload, seed, ids))
    error = next((answer.error for answer in answers if answer.error), "")
    return Run(budget, workload, 0.0 if error else figure(workload, answers), error, answers)


async def asked(server: Server, workload: str, seed: int, ids: range) -> list[Answer]:
    async with AsyncClient(server.socket) as client:
        return await drive(client, named(workload), seed, ids)


def predicted(budget: str, options: argparse.Namespace, cost: Cost, seed: int) -> list[Run]:
    """What the simulator says of the same deployment and the same prompts."""
    found: Resolved = resolve(None, {}, settings(budget, options) | {"prefix_cache": False})
    setting = setting_of(found, cost.model)
    runs = []
    for workload in options.workload:
        answers = predict(setting, named(workload), cost, seed=seed).answers
        runs.append(Run(budget, workload, figure(workload, answers), answers=answers))
    return runs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.long_prompt", description=purpose)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="registry name or directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budgets", default="off,128", help="arms: tokens of a step, or off; with commas")
    parser.add_argument("--min-chunk-tokens", type=int, default=16)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="each runs every arm twice: A B B A")
    parser.add_argument("--once", action="store_true", help="every arm once only: to try it out")
    parser.add_argument("--workload", action="append", choices=list(FIGURES), help="default: both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--plot", type=Path, metavar="PATH")
    parser.add_argument("--cost", type=Path, metavar="PATH", help="where the fitted cost goes")
    options = parser.parse_args()
    options.workload = options.workload or list(FIGURES)
    return options


def main() -> None:
    options = parse()
    budgets = options.budgets.split(",")
    order = budgets if options.once else turns(budgets, options.rounds)
    timer = StepTimer(
        resolve_model(options.model), dtype=options.dtype, threads=options.threads, tokens=SLOTS * WINDOW
    )
    vocabulary = timer.spec.vocab_size
    ids = range(min(1_000, vocabulary // 2), min(30_000, vocabulary))  # away from special ids
    calibration = Calibration(timer, shapes(budgets))
    line = ProgressLine()

    def calibrate() -> None:
        calibration.round(lambda done, total: line("measuring steps", done, total))
        line.clear()

    calibrate()
    runs: list[Run] = []
    for place, budget in enumerate(order):
        try:
            done = turn(budget, options, options.seed + place // len(budgets), ids)
        except ServerFailed as error:
            raise SystemExit(str(error)) from None
        for run in done:
            told = run.error or f"{FIGURES[run.workload]} {run.seconds * 1e3:.0f} ms"
            print(f"  budget {budget}, {run.workload}: {told}, load {os.getloadavg()[0]:.1f}", flush=True)
        runs += done
        calibrate()
    samples = calibration.samples()
    cost = calibrated(timer, samples)
    print(cost_table(cost, samples) + "\n")
    forecast = [run for budget in budgets for run in predicted(budget, options, cost, options.seed)]
    made = verdicts(runs, {(run.budget, run.workload): run.seconds for run in forecast})
    print(table(made))
    if options.cost:
        options.cost.write_bytes(encode_cost(cost))
    if options.json:
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        whole = {
            "machine": machine,
            "about": cost.about,
            "settings": {budget: settings(budget, options) for budget in budgets},
            "verdicts": made,
            "order": order,
            "measured": [(run.budget, run.workload, run.seconds, run.error) for run in runs],
            "cost": cost,
            "samples": [(*sample.work, sample.ns) for sample in samples],
        }
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    if options.plot:
        plot(runs, forecast, made, options.plot)


if __name__ == "__main__":
    main()
