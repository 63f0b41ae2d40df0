"""The depth 1 loop over a slot decoder, timed: host, device, and the gaps between graphs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tools.bench.slot_decode.attention import FLOAT_WORKSPACE, FlashInferAttention
from tools.bench.slot_decode.mailbox import RING
from tools.bench.slot_decode.model import random_weights
from tools.bench.slot_decode.state import Rows, Shape, SlotState
from tools.bench.slot_decode.step import SlotDecoder, Stages

PAGE = 16
SLOTS = 256
BUCKETS = (1, 8, 32, 64, 256)
PAGES = 20480  # 37.6 GB at this shape; longer contexts at 256 rows share pages, which no timing notices
PAGES_PER_SLOT = 288
WARM = 16  # steps a loop leaves out of its figures


def spread(nanoseconds: Sequence[float]) -> dict[str, float]:
    """Median and p99 in microseconds."""
    ordered = sorted(nanoseconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"p50": round(statistics.median(ordered) / 1e3, 2), "p99": round(p99 / 1e3, 2)}


@contextmanager
def events_around(decoder: SlotDecoder, bucket: int) -> Iterator[list[tuple[Any, Any]]]:
    """Record a timing event before and after every replay of a bucket while the context lasts."""
    replay, pairs = decoder.replays[bucket], []

    def timed() -> None:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        replay()
        pair[1].record()
        pairs.append(pair)

    decoder.replays[bucket] = timed
    try:
        yield pairs
    finally:
        decoder.replays[bucket] = replay


class Bench:
    """One model, one pool of pages, one decoder per attention kernel; the slots are refilled per case."""

    def __init__(self, shape: Shape, *, pages: int) -> None:
        self.shape = shape
        self.weights = random_weights(shape, torch.bfloat16, "cuda")
        self.state = SlotState(shape, SLOTS, pages, PAGES_PER_SLOT, PAGE, torch.bfloat16, "cuda")
        for cache in self.state.cache:
            cache.normal_()
        self.state.block_table[:SLOTS].random_(1, pages)
        workspace = torch.empty(FLOAT_WORKSPACE, dtype=torch.uint8, device="cuda")
        self.decoders = {
            name: SlotDecoder(self.weights, shape, self.state, BUCKETS, attention_of(self, workspace, cores))
            for name, cores in (("fa2", False), ("fa2-tc", True))
        }
        self.random = np.random.default_rng(0)

    def fill(self, decoder: SlotDecoder, rows: int, context: int) -> np.ndarray:
        """Random slots in slot order, each with `context` tokens in random pages."""
        torch.cuda.synchronize()
        slots = np.sort(self.random.permutation(SLOTS)[:rows]).astype(np.int32)
        pages = len(self.state.cache[0])
        table = self.random.permutation(rows * PAGES_PER_SLOT) % (pages - 1) + 1
        where = torch.from_numpy(slots).long().cuda()
        block = torch.from_numpy(table.reshape(rows, -1).astype(np.int32)).cuda()
        self.state.block_table[where] = block
        self.state.position[where] = context
        self.state.carry[where] = torch.randint(0, self.shape.vocab, (rows,), dtype=torch.int32).cuda()
        decoder.lengths[slots] = context
        torch.cuda.synchronize()
        return slots

    def loop(
        self, decoder: SlotDecoder, slots: np.ndarray, steps: int, *, depth: int, replan: bool
    ) -> dict[str, Any]:
        """Run steps; times are those between collecting one step and having launched the next."""
        host: list[int] = []
        cpu: list[int] = []
        waits: list[int] = []
        walls: list[int] = []
        stages: list[Stages] = []
        plans, gathered = decoder.plans, np.empty((steps, len(slots)), dtype=np.int32)
        gc.collect()
        gc.freeze()
        decoder.planned.clear()
        for _ in range(depth):
            decoder.launch(slots)
        seen = last = time.perf_counter_ns()
        for step in range(steps):
            if replan:
                decoder.planned.clear()
            before = time.thread_time_ns()
            stages.append(decoder.launch(slots))
            launched = time.perf_counter_ns()
            cpu.append(time.thread_time_ns() - before)
            host.append(launched - seen)
            _, tokens = decoder.collect(decoder.steps - depth)
            seen = time.perf_counter_ns()
            gathered[step] = tokens
            waits.append(seen - launched)
            walls.append(seen - last)
            last = seen
        decoder.collect(decoder.steps)
        gc.unfreeze()
        for column in (host, cpu, waits, walls, stages):
            del column[:WARM]
        mean = statistics.mean(walls)
        return {
            "step_us": spread(walls),
            "step_mean_us": round(mean / 1e3, 2),
            "tokens_per_s": round(len(slots) * 1e9 / mean),
            "host_us": spread(host),
            "host_cpu_us": spread(cpu),
            "wait_us": spread(waits),
            "prepare_us": spread([s.prepare for s in stages]),
            "plan_us": spread([s.plan for s in stages]),
            "replay_us": spread([s.replay for s in stages]),
            "plans_per_step": round((decoder.plans - plans) / (steps + depth), 3),
            "waited_for_host": sum(wait < 1000 for wait in waits),
        }

    def device_alone(self, decoder: SlotDecoder, slots: np.ndarray, repeats: int = 30) -> dict[str, float]:
        """A single replay on an idle stream, and replays back to back with nothing between them."""
        bucket = decoder.buckets[decoder.bucket_of[len(slots)]]
        with events_around(decoder, bucket) as pairs:
            for _ in range(repeats):
                decoder.launch(slots)
                torch.cuda.synchronize()
        single = [start.elapsed_time(end) * 1e6 for start, end in pairs]
        decoder.slots[:] = decoder.slots[(decoder.steps - 1) % RING]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            decoder.replays[bucket]()
        end.record()
        torch.cuda.synchronize()
        decoder.steps += repeats
        return {
            "graph_us": spread(single)["p50"],
            "graph_back_to_back_us": round(start.elapsed_time(end) * 1e3 / repeats, 2),
        }

    def gaps(self, decoder: SlotDecoder, slots: np.ndarray, steps: int, *, replan: bool) -> dict[str, Any]:
        """What the device does between two graphs of the depth 1 loop (the events cost some of it)."""
        bucket = decoder.buckets[decoder.bucket_of[len(slots)]]
        with events_around(decoder, bucket) as pairs:
            self.loop(decoder, slots, steps, depth=1, replan=replan)
        torch.cuda.synchronize()
        pairs = pairs[WARM:]
        busy = [start.elapsed_time(end) * 1e6 for start, end in pairs]
        gap = [a[1].elapsed_time(b[0]) * 1e6 for a, b in pairwise(pairs)]
        share = sum(gap) / (sum(gap) + sum(busy))
        return {"busy_us": spread(busy), "gap_us": spread(gap), "idle_share": round(share, 4)}

    def case(self, attention: str, rows: int, context: int, steps: int) -> dict[str, Any]:
        decoder = self.decoders[attention]

        def refill() -> np.ndarray:
            return self.fill(decoder, rows, context)

        self.loop(decoder, refill(), 32, depth=1, replan=True)
        result: dict[str, Any] = {"attention": attention, "rows": rows, "context": context}
        result |= self.device_alone(decoder, self.fill(decoder, rows, context + steps // 2 - 30))
        result["depth1"] = self.loop(decoder, refill(), steps, depth=1, replan=True)
        result["depth1_replan_on_page"] = self.loop(decoder, refill(), steps, depth=1, replan=False)
        if attention == "fa2-tc":
            decoder.horizon = 16
            result["depth1_replan_on_horizon"] = self.loop(decoder, refill(), steps, depth=1, replan=False)
            decoder.horizon = 1
        result["depth0"] = self.loop(decoder, refill(), steps, depth=0, replan=True)
        result["gaps"] = self.gaps(decoder, refill(), steps, replan=True)
        result["gaps_replan_on_page"] = self.gaps(decoder, refill(), steps, replan=False)
        return result

    def churn(self, attention: str, rows: int, context: int, steps: int) -> dict[str, Any]:
        """Every second step one row leaves and another joins: binds and 16 grants outside the graph."""
        decoder = self.decoders[attention]
        slots = self.fill(decoder, rows, context)
        idle = np.setdiff1d(np.arange(SLOTS, dtype=np.int32), slots)
        quiet: list[int] = []
        busy: list[int] = []
        decoder.launch(slots)
        for step in range(steps):
            joins = step % 2 == 1
            if joins:
                at, reserve = step % rows, step % len(idle)
                slots = slots.copy()
                slots[at], idle[reserve] = idle[reserve], slots[at]
                pages = self.random.integers(1, len(self.state.cache[0]), 16)
                grants = np.stack([np.full(16, slots[at]), np.arange(16), pages], 1).astype(np.int32)
                binds = np.array([(slots[at], 128, 1)], dtype=np.int32)
            seen = time.perf_counter_ns()
            if joins:
                decoder.bind(binds, grants)
            decoder.launch(slots)
            (busy if joins else quiet).append(time.perf_counter_ns() - seen)
            decoder.collect(decoder.steps - 1)
        decoder.collect(decoder.steps)
        return {
            "rows": rows,
            "without_join_us": spread(quiet[8:]),
            "with_join_us": spread(busy[8:]),
        }


def attention_of(bench: Bench, workspace: torch.Tensor, cores: bool) -> Callable[[Rows], FlashInferAttention]:
    return lambda rows: FlashInferAttention(rows, bench.state, bench.shape, workspace, tensor_cores=cores)
