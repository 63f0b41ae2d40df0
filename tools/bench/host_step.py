"""Host time per step with a null forward: planning, ledger, encoding, validation, stop checks, emission.

The rank's own classes run in their own order over a real step ring and a real token ring that
another process empties; only the model is missing: the device writes ready tokens. CPU time of the
thread, from collecting step N-1 to having launched step N+1.

    python -m tools.bench.host_step [--rows 64,256] [--steps 4000] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.engine.device import CpuDevice
from mstar.engine.executor import Executor, SlotState
from mstar.engine.results import ResultSlot
from mstar.engine.slot_table import SlotTable
from mstar.messages.request import Admit, Sampling
from mstar.messages.step import StepPlan
from mstar.messages.tokens import encode_tokens
from mstar.worker.scheduler import Limits, MicroScheduler, StepResult
from shm.ring import Ring, RingReader, RingWriter
from shm.slab import SlabHandle, SlabOwner, SlabPool
from shm.steps import StepLayout, StepRing, StepWriter

PAGE, PROMPT, OUT = 16, 640, 256


class NullState(SlotState):
    """Keeps nothing by slot."""


class Figures(NamedTuple):
    """Microseconds of CPU time a step: all steps, and by duty (mean)."""

    rows: float
    mean: float
    p50: float
    p90: float
    p99: float
    admit: float
    plan: float
    launch: float
    collect: float
    emit: float
    run_queue_us: float


def reader_process(ring: Ring) -> int:
    """Fork a process that empties ``ring``."""
    pid = os.fork()
    if pid:
        return pid
    _pin(1)
    reader = RingReader(ring)
    while True:
        record = reader.peek()
        if record is None:
            time.sleep(0.0002)
        else:
            reader.release()


def measure(rows: int, steps: int, depth: int) -> Figures:
    """Run ``steps`` steps of about ``rows`` decoding rows that are replaced as they end."""
    slots = rows + rows // 4 + 8
    limits = Limits(
        slots=slots,
        max_seq_len=2048,
        pages=slots * (PROMPT + 2 * OUT) // PAGE,
        page_size=PAGE,
        batch_tokens=8192,
        min_chunk_tokens=64,
        depth=depth,
        max_waiting=1 << 20,
    )
    layout = StepLayout(slots, slots * 2 + limits.batch_tokens // PAGE, limits.tail_bytes, depth + 2, 0)
    steps_ring = StepWriter(StepRing.create(layout), [])
    replays = SlabOwner(SlabPool.create([(1 << 16, 8)]))
    scheduler = MicroScheduler(limits, steps_ring.begin, replays)
    rng = np.random.default_rng(0)
    ready = [rng.integers(100, 40000, slots, dtype=np.int32) for _ in range(64)]

    def forward(plan: StepPlan, results: ResultSlot) -> None:
        results.tokens[:] = ready[plan.seq & 63]

    table = SlotTable(slots, (limits.max_seq_len // PAGE,))
    prompt: NDArray[np.int32] = rng.integers(100, 40000, PROMPT, dtype=np.int32)
    executor = Executor(table, NullState(), CpuDevice(slots, depth, forward), lambda bind: prompt)
    ring = Ring.create(1 << 22)
    pid = reader_process(ring)
    writer = RingWriter(ring, None)
    _pin(0)
    request = 0

    def admit() -> None:
        nonlocal request
        request += 1
        length = int(rng.integers(OUT // 2, OUT * 3 // 2))
        handle = SlabHandle(0, 0, prompt.nbytes)
        message = Admit(request, 0, handle, PROMPT, length, Sampling(temperature=0.0), (2,))
        scheduler.admit(message, prompt, lambda: None)

    marks: list[tuple[int, ...]] = []
    sizes: list[int] = []
    clock = time.thread_time_ns
    pipeline = scheduler.pipeline
    gc.collect()
    gc.freeze()
    gc.disable()
    waited = _run_queue_ns()
    try:
        for step in range(steps + 300):
            t0 = clock()
            counts = len(scheduler._slot_of) + len(scheduler._waiting)
            for _ in range(min(rows - counts, 4 if step > 300 else rows)):
                admit()
            t1 = clock()
            plan = scheduler.plan()
            t2 = clock()
            if plan is not None:
                executor.launch(plan)
                steps_ring.commit(plan.seq)
            t3 = clock()
            seq = pipeline.oldest
            results = executor.landed(seq, flush=plan is None)
            landed = None
            if results is not None:
                landed = scheduler.land(seq, StepResult(results.tokens))
            t4 = clock()
            if landed is not None and landed.batch is not None:
                while not writer.send_parts(encode_tokens(landed.batch)):
                    time.sleep(0.001)
            t5 = clock()
            if step >= 300:
                marks.append((t0, t1, t2, t3, t4, t5))
                sizes.append(plan.request.size if plan is not None else 0)
        waited = _run_queue_ns() - waited
    finally:
        gc.enable()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    spans = np.diff(np.array(marks), axis=1) / 1e3
    total = np.sort(spans.sum(1))
    at = lambda q: float(total[int(q * (total.size - 1))])  # noqa: E731
    duties = spans.mean(0)
    return Figures(
        float(np.mean(sizes)),
        float(total.mean()),
        at(0.5),
        at(0.9),
        at(0.99),
        *map(float, duties),
        waited / 1e3,
    )


def _pin(core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


def _run_queue_ns() -> int:
    with open("/proc/self/schedstat") as file:
        return int(file.read().split()[1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    found = {}
    print(
        "rows   mean    p50    p90    p99 us | admit  plan launch collect emit | waited for a core, us a step"
    )
    for rows in map(int, options.rows.split(",")):
        figures = measure(rows, options.steps, options.depth)
        found[str(rows)] = figures._asdict()
        print(
            f"{figures.rows:5.0f} {figures.mean:6.1f} {figures.p50:6.1f} {figures.p90:6.1f} {figures.p99:6.1f}    |"
            f" {figures.admit:5.1f} {figures.plan:5.1f} {figures.launch:6.1f} {figures.collect:6.1f}"
            f" {figures.emit:5.1f} | {figures.run_queue_us / options.steps:.1f}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"depth": options.depth, "steps": options.steps, "rows": found}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
