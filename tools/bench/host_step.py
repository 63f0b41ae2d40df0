"""Host time per step with a null forward.

Admission, planning, ledger, encoding, validation, stop checks, emission: the rank's own classes run in
their own order over a real step ring and a real token ring that another process empties; only the model
is missing: the device writes ready tokens. A step is measured from taking in admissions to having
launched, collected and emitted, as CPU time of the thread and as wall time.

Two runs make a row: one with a clock at the ends of a step only, for the figures of whole steps, and one
with a clock between duties, for their means. What a reading of the clock costs is measured and taken off.

    python -m tools.bench.host_step [--rows 1,16,64,256] [--steps 4000] [--aligned] [--chunks] [--cache]
        [--readers N] [--json FILE]

``--aligned``: all rows start, cross their page borders and end in the same steps. ``--chunks``: two rows are
in the middle of a long prompt in every step. ``--cache``: prompts come with the digests of their pages, all
different, so that pages are filed, cached and evicted all the time. ``--readers``: so many more ranks
listen on the step ring, each a process that validates and applies every step; what the leader waits for them
is not counted. ``--quiet US``: measure again until the thread waited for a core less than US microseconds a
step on average, or say that it did not come to that.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.engine.device import CpuDevice
from mstar.engine.executor import Executor, SlotState
from mstar.engine.results import ResultSlot
from mstar.engine.slot_table import SlotTable
from mstar.messages.prefix import DIGEST_BYTES
from mstar.messages.request import Admit, Sampling, control_decoder, encode_control
from mstar.messages.step import StepPlan
from mstar.messages.tokens import RUNNING, TokenBatch, encode_tokens
from mstar.worker.follower import Follower
from mstar.worker.leader import Leader
from mstar.worker.scheduler import Limits, MicroScheduler
from shm.board import Board
from shm.doorbell import Doorbell
from shm.ring import Ring, RingReader, RingWriter
from shm.slab import SlabHandle, SlabOwner, SlabPool
from shm.steps import StepLayout, StepReader, StepRing, StepWriter
from shm.wait import Bell, Sleeper

PAGE, PROMPT, OUT = 16, 640, 256
CHUNK, LONG_PROMPT, LONG_ROWS = 64, 4096, 2
BATCH_TOKENS = 8192
STOP_ID = 2
RING_SLOTS = 8
WARM_UP = 300
DUTIES = ("admit", "plan", "launch", "collect", "emit")


Coming = tuple[bytes, bytes]
"""The record of a request, and the digests of its prompt's pages."""


class NullState(SlotState):
    """Keeps nothing by slot."""


class Load(NamedTuple):
    """What runs: decoding rows, and how they come."""

    rows: int
    depth: int
    aligned: bool
    chunks: bool
    readers: int = 0
    cache: bool = False


class Figures(NamedTuple):
    """Microseconds a step. ``duties`` are means of CPU time, ``waited`` is what the thread waited for a core.

    ``border`` is the mean over decode steps in which half of the rows or more get a page (--aligned),
    NaN where there is none. ``clock`` was taken off every figure.
    """

    rows: float
    mean: float
    p50: float
    p90: float
    p99: float
    wall_p50: float
    per_row: float
    border: float
    duties: dict[str, float]
    waited: float
    clock: float


class NullRank:
    """The rank's loop without actor, model or sleep."""

    def __init__(self, load: Load) -> None:
        self.load = load
        longs = LONG_ROWS if load.chunks else 0
        slots = load.rows + load.rows // 4 + 8
        self._prompt = CHUNK if load.chunks else PROMPT
        # With long prompts: a chunk for each of them in every step, and two for those who come in.
        batch_tokens = load.rows + (longs + 2) * CHUNK if load.chunks else BATCH_TOKENS
        limits = Limits(
            slots=slots,
            max_seq_len=LONG_PROMPT + 64 if load.chunks else 2048,
            pages=slots * (PROMPT + 2 * OUT) // PAGE + longs * 2 * LONG_PROMPT // PAGE,
            page_size=PAGE,
            batch_tokens=max(batch_tokens, load.rows * self._prompt) if load.aligned else batch_tokens,
            min_chunk_tokens=CHUNK,
            depth=load.depth,
            prefix_cache=load.cache,
            max_waiting=1 << 20,
        )
        grants = slots * 2 + limits.batch_tokens // PAGE
        ring_slots = load.depth + 2 if not load.readers else RING_SLOTS
        layout = StepLayout(slots, grants, limits.tail_bytes, ring_slots, load.readers)
        self._board = Board.create(load.readers + 1)
        self._doorbells = [Doorbell.create() for _ in range(load.readers)]
        bells = [Bell(self._board.line(i), bell) for i, bell in enumerate(self._doorbells)]
        self.step_ring = StepRing.create(layout)
        self.steps = StepWriter(self.step_ring, bells)
        self.replays = SlabOwner(SlabPool.create([(1 << 16, 8)]))
        self.limits = limits
        self.scheduler = MicroScheduler(limits, self.steps.begin, self.replays, salt=b"salt")
        self._rng = rng = np.random.default_rng(0)
        self._ready = [rng.integers(100, 40000, slots, dtype=np.int32) for _ in range(64)]
        self._prompts: dict[int, NDArray[np.int32]] = {
            length: rng.integers(100, 40000, length, dtype=np.int32) for length in (self._prompt, LONG_PROMPT)
        }
        self.executor = self._executor()
        self.leader = Leader(self.scheduler, self.executor, self.steps, load.readers, ring_slots)
        self.ring = Ring.create(1 << 22)
        self.writer = RingWriter(self.ring, None)
        self._request = 0
        self._long: set[int] = set()
        self._short = 0
        self._batch: TokenBatch | None = None

    def _executor(self) -> Executor:
        """What a rank runs steps with: the real table and bookkeeping, and no model."""
        slots = self.limits.slots
        table = SlotTable(slots, (self.limits.pages_of(self.limits.max_seq_len),))
        device = CpuDevice(slots, self.load.depth, self._forward)
        return Executor([table], [NullState()], device, lambda bind: self._prompts[bind.length])

    def follow(self, index: int, parent: int) -> None:
        """Be the rank that reads the step ring as reader ``index``, for as long as ``parent`` lives."""
        reader = StepReader(self.step_ring, index)
        follower, sleeper = Follower(self._executor(), reader), Sleeper(self._board.line(index))
        fd = self._doorbells[index].fd
        while os.getppid() == parent:
            if follower.turn() or not sleeper.announce(reader.has_data):
                continue
            select.select([fd], [], [], 0.1)
            self._doorbells[index].drain()
            sleeper.awake()

    def _forward(self, plan: StepPlan, results: ResultSlot) -> None:
        results.tokens[:] = self._ready[plan.seq & 63]

    def _message(self, prompt: int, tokens: int) -> Coming:
        self._request += 1
        handle = SlabHandle(0, 0, 4 * prompt)
        pages = prompt // PAGE if self.load.cache else 0
        sampling = Sampling(temperature=0.0)
        message = Admit(self._request, 0, handle, prompt, tokens, sampling, (STOP_ID,), hashes=pages)
        return encode_control(message), self._rng.bytes(DIGEST_BYTES * pages)

    def requests(self) -> list[Coming]:
        """The records and digests of those who come in before the next step, as many as keep the load up."""
        load = self.load
        records = []
        missing = load.rows - self._short
        if load.aligned:
            missing = load.rows if not self._short else 0
        for _ in range(missing):
            tokens = OUT if load.aligned else int(self._rng.integers(OUT // 2, OUT * 3 // 2))
            records.append(self._message(self._prompt, tokens))
        self._short += len(records)
        while load.chunks and len(self._long) < LONG_ROWS:
            records.append(self._message(LONG_PROMPT, 1))
            self._long.add(self._request)
        return records

    def step(self, records: list[Coming], mark: Callable[[], None]) -> StepPlan | None:
        """One turn of the loop; ``mark`` is called between its duties."""
        scheduler, leader = self.scheduler, self.leader
        for record, digests in records:
            message = control_decoder.decode(record)
            if isinstance(message, Admit):
                scheduler.admit(message, self._prompts[message.prompt_tokens], digests, _nothing)
        mark()
        plan = leader.plan()
        mark()
        if plan is not None:
            leader.launch(plan)
        mark()
        landed = leader.collect(flush=plan is None)
        mark()
        if landed is not None and landed.batch is not None:
            parts = encode_tokens(landed.batch)
            while not self.writer.send_parts(parts):
                time.sleep(0.001)
            self._batch = landed.batch
        return plan

    def close(self) -> None:
        """Give the shared memory back."""
        self.step_ring.close()
        self.replays.pool.close()
        self.ring.close()

    def settle(self) -> None:
        """Count who ended and let the followers catch up, outside of what is measured."""
        last = self.scheduler.pipeline.planned - self.load.depth
        while any(self.steps.done(reader) < last for reader in range(self.load.readers)):
            time.sleep(0.0001)
        batch, self._batch = self._batch, None
        if batch is None:
            return
        for request in batch.request[batch.finish != RUNNING].tolist():
            if request in self._long:
                self._long.remove(request)
            else:
                self._short -= 1


def measure(load: Load, steps: int) -> Figures:
    """Run ``steps`` steps of ``load`` twice: whole, and by duty."""
    rank = NullRank(load)
    others = [_reader_process(rank.ring), *(_follower_process(rank, i) for i in range(load.readers))]
    _pin(0)
    cpu, wall = time.thread_time_ns, time.perf_counter_ns
    clock = _clock_cost()
    gc.collect()
    gc.freeze()
    gc.disable()
    whole: list[tuple[int, int, int, int]] = []
    marks: list[list[int]] = []
    try:
        for _ in range(WARM_UP):
            rank.step(rank.requests(), _nothing)
            rank.settle()
        waited = _run_queue_ns()
        for _ in range(steps):
            records = rank.requests()
            wall_start = wall()
            start = cpu()
            plan = rank.step(records, _nothing)
            end = cpu()
            wall_end = wall()
            rank.settle()
            rows, border = 0, False
            if plan is not None:
                rows = plan.slot.size
                border = rows > 1 and not plan.chunk_starts.size and plan.grant_slot.size * 2 >= rows
            whole.append((end - start, wall_end - wall_start, rows, border))
        waited = _run_queue_ns() - waited
        for _ in range(steps):
            records = rank.requests()
            times = [cpu()]
            rank.step(records, lambda times=times: times.append(cpu()))  # type: ignore[misc]
            times.append(cpu())
            marks.append(times)
            rank.settle()
    finally:
        gc.enable()
        gc.unfreeze()
        for other in others:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
        rank.close()
    figures = np.array(whole)
    total = figures[:, 0] / 1e3 - clock
    sizes = figures[:, 2]
    borders = total[figures[:, 3] > 0]
    duties = np.diff(np.array(marks), axis=1).mean(0) / 1e3 - clock
    return Figures(
        rows=float(sizes.mean()),
        mean=float(total.mean()),
        p50=float(np.quantile(total, 0.5)),
        p90=float(np.quantile(total, 0.9)),
        p99=float(np.quantile(total, 0.99)),
        wall_p50=float(np.quantile(figures[:, 1], 0.5)) / 1e3 - clock,
        per_row=float(total.mean() / max(sizes.mean(), 1)),
        border=float(borders.mean()) if load.aligned and borders.size else float("nan"),
        duties=dict(zip(DUTIES, duties.tolist(), strict=True)),
        waited=waited / 1e3 / steps,
        clock=clock,
    )


def quietest(load: Load, steps: int, limit: float | None, tries: int = 5) -> Figures:
    """Measure until the thread waited for a core less than ``limit`` us a step; else the calmest try."""
    best = measure(load, steps)
    for _ in range(tries if limit is not None else 0):
        if limit is not None and best.waited <= limit:
            break
        time.sleep(2)
        again = measure(load, steps)
        best = min(best, again, key=lambda figures: figures.waited)
    return best


def _nothing() -> None:
    """Between the duties of a step that is measured as a whole."""


def _reader_process(ring: Ring) -> int:
    """Fork a process that empties ``ring``, until it is killed or its parent is gone."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    _pin(1)
    reader = RingReader(ring)
    while os.getppid() == parent:
        record = reader.peek()
        if record is None:
            time.sleep(0.0002)
        else:
            reader.release()
    os._exit(0)


def _follower_process(rank: NullRank, index: int) -> int:
    """Fork a rank that follows, until it is killed or its parent is gone."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    _pin(1)
    rank.follow(index, parent)
    os._exit(0)


def _clock_cost() -> float:
    """Microseconds that two readings of the thread's clock in a row are apart."""
    clock = time.thread_time_ns
    return float(np.median([-clock() + clock() for _ in range(2000)])) / 1e3


def _pin(core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


def _run_queue_ns() -> int:
    """Nanoseconds this thread was ready to run and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


def main(argv: list[str] | None = None) -> int:
    """Print a row for each number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--aligned", action="store_true")
    parser.add_argument("--chunks", action="store_true")
    parser.add_argument("--cache", action="store_true")
    parser.add_argument("--readers", type=int, default=0)
    parser.add_argument("--quiet", type=float, metavar="US")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    cores = os.sched_getaffinity(0)
    found: list[dict[str, Any]] = []
    print(
        "                 CPU us a step                |      by duty, mean CPU us        | wall  | waits for"
    )
    print(
        "rows   mean    p50    p90    p99 a row border |  admit   plan launch collect emit |  p50  | a core"
    )
    for rows in map(int, options.rows.split(",")):
        load = Load(rows, options.depth, options.aligned, options.chunks, options.readers, options.cache)
        figures = quietest(load, options.steps, options.quiet)
        os.sched_setaffinity(0, cores)
        found.append({**load._asdict(), "steps": options.steps, "measured": figures._asdict()})
        print(_line(figures), flush=True)
        if options.json:
            _save(options.json, found)
    return 0


def _line(figures: Figures) -> str:
    whole = (figures.mean, figures.p50, figures.p90, figures.p99)
    return (
        f"{figures.rows:4.0f} {' '.join(f'{value:6.1f}' for value in whole)} {figures.per_row:5.2f}"
        f" {figures.border:6.1f} | {' '.join(f'{value:6.1f}' for value in figures.duties.values())} |"
        f" {figures.wall_p50:6.1f} {figures.waited:7.1f}"
    )


def _save(path: Path, found: list[dict[str, Any]]) -> None:
    """Add these rows to what the file holds; a load measured again replaces its former figures."""
    key = ("aligned", "cache", "chunks", "depth", "readers", "rows")
    kept = json.loads(path.read_text())["loads"] if path.exists() else []
    loads = {tuple(row.get(name, 0) for name in key): row for row in (*kept, *found)}
    machine = {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()}
    whole = {
        "what": "CPU microseconds a step of a rank with a null forward; waited: us a step without a core",
        "machine": {**machine, "numpy": np.__version__},
        "loads": [loads[at] for at in sorted(loads)],
    }
    path.write_text(json.dumps(whole, indent=1).replace("NaN", "null") + "\n")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
