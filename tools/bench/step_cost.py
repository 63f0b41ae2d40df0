"""What a step of a real model costs on this machine, over a grid of shapes, fitted for `mstar simulate`.

The model's forward and sampler run in this process, on rows that lie in a real paged cache (what is in it
costs the same whatever it says): decodes, chunks of a prompt, and chunks beside decodes. Each shape is taken
once a round, and the median counts, because machines drift.

    python -m tools.bench.step_cost --model smollm2-135m-instruct --threads 1 --json cost.json
    mstar simulate default --cost cost.json --workload long-beside-decodes
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mstar.cli.table import ProgressLine
from mstar.engine.sampler import Sampler
from mstar.messages.request import Sampling
from mstar.model.api import ForwardBatch, KVCache
from mstar.model.choose import CpuChoice, choose_cpu, choose_layout
from mstar.model.files import ModelFiles, resolve
from mstar.model.spec import ModelSpec, read_spec
from mstar.model.weights import load_model
from mstar.simulation.calibrate import Sample, fit, misfit
from mstar.simulation.cost import CostTable, Host, ModelFacts, encode_cost
from mstar.worker.budget import StepWork

__all__ = ["Calibration", "Row", "Shape", "StepTimer", "calibrated", "grid", "table"]

PAGE = 16
HOST = Host(70_000, 900, submit_ns=3_000_000, submit_token_ns=1_000, deliver_ns=1_000_000, inline=True)
"""A rank's thread with a null forward (tools.bench.host_step), and a guess of the way through the gateway."""


class Row(NamedTuple):
    """A row of a step: new tokens, and tokens in the cache after it."""

    query: int
    length: int


Shape = tuple[Row, ...]


def work_of(shape: Shape) -> StepWork:
    """What a cost model sees of ``shape``."""
    return StepWork(sum(row.query for row in shape), len(shape), sum(row.query * row.length for row in shape))


def grid(longest: int, rows: Sequence[int] = (1, 2, 4, 8, 16)) -> list[Shape]:
    """Shapes of steps up to sequences of ``longest`` tokens: decodes, chunks, and chunks beside 8 decodes."""
    lengths = sorted({length for length in (64, 400, longest) if length <= longest})
    shapes: list[Shape] = [(Row(1, length),) * count for count in rows for length in lengths]
    chunks = [size for size in (16, 32, 64, 128, 256, 512, 1024) if size < longest]
    shapes += [(Row(size, size),) for size in (*chunks, longest)]
    shapes += [(Row(size, longest),) for size in chunks if 2 * size <= longest]
    beside = (Row(1, min(100, longest)),) * 8
    shapes += [
        (*beside, Row(size - len(beside), length))
        for size in chunks
        for length in (longest // 2, longest)
        if len(beside) < size < length
    ]
    shapes.append((*beside, Row(longest, longest)))
    return shapes


class StepTimer:
    """A model and a cache in this process. ``dtype`` and ``threads`` None: what a rank would choose.

    ``clock`` gives nanoseconds: of the wall, or of the thread where other processes disturb and one thread
    does the work.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        dtype: str | None,
        threads: int | None,
        tokens: int,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._clock = clock
        self.spec: ModelSpec = read_spec(files.directory)
        self.name = files.name
        choice = _choice(self.spec, dtype, threads)
        self.dtype, self.threads = choice.dtype, choice.threads
        torch.set_num_threads(choice.threads)
        device = torch.device("cpu")
        self._model = load_model(files, dtype=choice.dtype, device=device, layout=choice.layout)
        self._kv = KVCache.allocate(self.spec, -(-tokens // PAGE), PAGE, choice.dtype, device)
        for part in (*self._kv.keys, *self._kv.values):
            part.fill_(
                0.5
            )  # memory that nobody has touched costs more at first, and real rows have written theirs
        self._sampler = Sampler(256, self.spec.vocab_size, device)
        prompt = np.zeros(1, np.int32)
        for slot in range(256):
            self._sampler.bind(slot, Sampling(0.0), stop_ids=(), min_tokens=0, prompt=prompt, accepted=0)

    @property
    def token_bytes(self) -> int:
        """What a token takes in the cache."""
        return KVCache.nbytes_per_page(self.spec, 1, self.dtype)

    def ns(self, shape: Shape) -> int:
        """Run a step of ``shape`` once: nanoseconds of forward and sampler."""
        batch, slots, places = self._batch(shape)
        began = self._clock()
        with torch.inference_mode():
            self._sampler.sample(self._model(batch, self._kv), slots, places, logprobs=False)
        return self._clock() - began

    def _batch(self, shape: Shape) -> tuple[ForwardBatch, NDArray[np.int32], NDArray[np.int64]]:
        """The rows side by side in the cache, from page 0 on."""
        held = [-(-row.length // PAGE) for row in shape]
        firsts = np.cumsum([0, *held[:-1]])
        if firsts[-1] + held[-1] > self._kv.pages:
            raise ValueError(f"{shape} takes more than the {self._kv.pages} pages of the cache")
        table = firsts[:, None] + np.arange(max(held))
        positions = [np.arange(row.length - row.query, row.length) for row in shape]
        mapping = np.concatenate([first * PAGE + at for first, at in zip(firsts, positions, strict=True)])
        place = np.concatenate(positions)
        tokens = np.random.default_rng(0).integers(0, self.spec.vocab_size, place.size)
        batch = ForwardBatch(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(place),
            slot_mapping=torch.from_numpy(mapping),
            query_lens=[row.query for row in shape],
            kv_lens=[row.length for row in shape],
            block_tables=torch.from_numpy(table.astype(np.int32)),
            logits_rows=torch.from_numpy(np.cumsum([row.query for row in shape]) - 1),
        )
        return batch, np.arange(len(shape), dtype=np.int32), np.array([row.length for row in shape])


class Calibration:
    """Rounds through ``shapes``; the median of each counts. Rounds may lie minutes apart."""

    def __init__(self, timer: StepTimer, shapes: Sequence[Shape]) -> None:
        self.timer = timer
        self._times: dict[Shape, list[int]] = {shape: [] for shape in shapes}
        for shape in shapes[:3]:
            timer.ns(shape)

    def round(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Run every shape once."""
        for done, (shape, times) in enumerate(self._times.items(), 1):
            times.append(self.timer.ns(shape))
            progress(done, len(self._times))

    def samples(self) -> list[Sample]:
        """The median time of each shape so far."""
        return [Sample(work_of(shape), statistics.median(times)) for shape, times in self._times.items()]


def calibrated(timer: StepTimer, samples: Sequence[Sample], host: Host = HOST) -> CostTable:
    """The fitted cost, with where it comes from."""
    spec = timer.spec
    facts = ModelFacts(timer.name, spec.max_position, timer.token_bytes)
    dtype = str(timer.dtype).removeprefix("torch.")
    about = (
        f"{timer.name} in {dtype}, {timer.threads} thread(s), "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    )
    return fit(samples, facts, host=host, about=about)


def table(cost: CostTable, samples: Sequence[Sample]) -> str:
    """Measured and fitted, a line a shape."""
    lines = ["| tokens | rows | pairs | measured ms | fitted ms | off |", "|---|---|---|---|---|---|"]
    for work, ns in samples:
        told = cost.ns(work, 1)
        lines.append(
            f"| {work.tokens} | {work.rows} | {work.context} | {ns / 1e6:.1f} | {told / 1e6:.1f} "
            f"| {told / ns - 1:+.0%} |"
        )
    off = misfit(cost, samples)
    lines.append(f"off by {off.median:.1%} in the median, {off.worst:.0%} at most")
    return "\n".join(lines)


def _choice(spec: ModelSpec, dtype: str | None, threads: int | None) -> CpuChoice:
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and threads is not None:
        return CpuChoice(named[dtype], threads, choose_layout(spec, named[dtype]))
    found = choose_cpu(spec)
    if dtype is not None:
        found = found._replace(dtype=named[dtype], layout=choose_layout(spec, named[dtype]))
    return found._replace(threads=threads or found.threads)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.step_cost", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="registry name or directory")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of the longest sequence")
    parser.add_argument("--rows", default="1,2,4,8,16", help="how many decodes at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cpu-time", action="store_true", help="for a busy machine: what the thread used, not what it took"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the cost goes")
    options = parser.parse_args()
    rows = [int(part) for part in options.rows.split(",")]
    shapes = grid(options.longest, rows)
    tokens = max(sum(-(-row.length // PAGE) * PAGE for row in shape) for shape in shapes)
    timer = StepTimer(
        resolve(options.model),
        dtype=options.dtype,
        threads=options.threads,
        tokens=tokens,
        clock=time.thread_time_ns if options.cpu_time else time.perf_counter_ns,
    )
    if options.cpu_time and timer.threads > 1:
        parser.error(f"--cpu-time counts one thread, the model runs on {timer.threads}: add --threads 1")

    line = ProgressLine()
    calibration = Calibration(timer, shapes)
    for place in range(options.rounds):
        calibration.round(lambda done, total, place=place: line(f"round {place + 1}", done, total))  # type: ignore[misc]
    line.clear()
    samples = calibration.samples()
    cost = calibrated(timer, samples)
    print(table(cost, samples))
    print(cost.about)
    if options.json:
        options.json.write_bytes(encode_cost(cost))


if __name__ == "__main__":
    main()
