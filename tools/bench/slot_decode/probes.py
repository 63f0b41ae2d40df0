"""Probes of the parts of a slot decode step: planning, staging, the bookkeeping kernels, the word."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tools.bench.slot_decode import kernels
from tools.bench.slot_decode.attention import FlashInferAttention
from tools.bench.slot_decode.loop import PAGE, Bench, spread
from tools.bench.slot_decode.mailbox import RING


def planned_by(
    plan: Callable[[torch.Tensor, torch.Tensor], None], last_page_len: torch.Tensor, indptr: np.ndarray
) -> None:
    plan(torch.from_numpy(indptr), last_page_len)


def plan_cost(bench: Bench, rows: int, context: int, repeats: int = 300) -> dict[str, Any]:
    """Host time of the ways to plan, page counts differing from call to call."""
    result: dict[str, Any] = {"rows": rows, "context": context}
    pages = (context + bench.random.integers(0, 256, (repeats, rows))) // PAGE + 1
    indptr = np.zeros((repeats, rows + 1), dtype=np.int32)
    indptr[:, 1:] = np.cumsum(pages, 1)
    last = torch.full((rows,), 5, dtype=torch.int32)
    for name, decoder in bench.decoders.items():
        attention = decoder.attention[rows]
        assert isinstance(attention, FlashInferAttention)
        decoder.planned.clear()
        ways: dict[str, Callable[[np.ndarray], None]] = {
            "wrapper_plan": partial(planned_by, attention.plan_in_full, last),
            "fast_decode_plan": partial(planned_by, attention.plan_fast, last),
            "planner_alone": attention.plan,
        }
        for way, call in ways.items():
            times = []
            for i, row in enumerate(indptr):
                start = time.perf_counter_ns()
                call(row)
                times.append(time.perf_counter_ns() - start)
                if i % 50 == 49:
                    torch.cuda.synchronize()
            result[f"{name}/{way}_us"] = spread(times[20:])
    return result


def staging_hazard(bench: Bench) -> dict[str, bool]:
    """Plan A, then plan B while the device is busy: does A's work list reach the device before B's?"""
    result = {}
    for name, decoder in bench.decoders.items():
        attention = decoder.attention[64]
        assert isinstance(attention, FlashInferAttention)
        decoder.planned.clear()
        a = np.arange(65, dtype=np.int32) * 40
        b = np.cumsum(np.r_[0, np.arange(64) % 7 * 30 + 1]).astype(np.int32)
        device = attention.buffers[1]
        shared = attention.staging
        for way, staging in (("one_staging_buffer", shared[:1]), ("staging_in_turn", shared)):
            attention.staging, attention.turn = staging, 0
            torch.cuda.synchronize()
            attention.plan(a)
            torch.cuda.synchronize()
            wanted = device[:4096].clone()
            attention.plan(b)
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)
            attention.plan(a)
            found = device[:4096].clone()
            attention.plan(b)
            torch.cuda.synchronize()
            result[f"{name}/{way}_keeps_plan"] = bool(torch.equal(wanted, found))
        attention.staging = shared
    return result


def bookkeeping(bench: Bench, rows: int, context: int, repeats: int = 300) -> dict[str, Any]:
    """The step without its model: the three bookkeeping kernels alone, and how the host learns of the end."""
    decoder = bench.decoders["fa2"]
    slots = bench.fill(decoder, rows, context)
    state, mailbox, buffers = bench.state, decoder.mailbox, decoder.rows[rows]
    decoder.slots[:, :rows] = slots
    tokens = torch.ones(rows, dtype=torch.int64, device="cuda")

    def enqueue(slot_ring: torch.Tensor, token_ring: torch.Tensor) -> None:
        kernels.begin_rows(
            decoder.counter, slot_ring, buffers.slots, state.carry, state.position, buffers.ids,
            buffers.positions, buffers.indptr, buffers.last_page_len, PAGE,
        )  # fmt: skip
        kernels.gather_pages(buffers.slots, state.block_table, buffers.indptr, buffers.indices)
        kernels.publish(
            tokens, buffers.slots, state.scratch, state.carry, state.position, decoder.counter,
            token_ring, mailbox.word,
        )  # fmt: skip

    result: dict[str, Any] = {"rows": rows, "context": context}
    on_device = [mailbox.tensors[name].cuda() for name in ("slots", "tokens")]
    for name, rings in (
        ("mapped", [mailbox.tensors["slots"], mailbox.tensors["tokens"]]),
        ("device_rings", on_device),
    ):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(8):
                enqueue(*rings)
        times = []
        for _ in range(20):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e6 / 8)
            bench.state.position[torch.from_numpy(slots).long().cuda()] = context
        result[f"{name}_device_us"] = spread(times)["p50"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        enqueue(mailbox.tensors["slots"], mailbox.tensors["tokens"])
    event, copied = torch.cuda.Event(), torch.empty(rows, dtype=torch.int64, pin_memory=True)
    flag, sequence = torch.zeros(1, dtype=torch.int64).pin_memory(), torch.zeros(1, dtype=torch.int64).cuda()
    flag_word = flag.numpy().view(np.uint64).data
    words = mailbox.words
    ways: dict[str, list[int]] = {"word": [], "event": [], "copied_word": [], "replay_call": []}
    for i in range(repeats):
        torch.cuda.synchronize()
        target = words[0] + 1
        began = time.perf_counter_ns()
        graph.replay()
        called = time.perf_counter_ns()
        while words[0] < target:
            pass
        ways["word"].append(time.perf_counter_ns() - began)
        ways["replay_call"].append(called - began)
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        graph.replay()
        event.record()
        event.synchronize()
        ways["event"].append(time.perf_counter_ns() - began)
        sequence.fill_(i + 1)
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        graph.replay()
        copied.copy_(tokens, non_blocking=True)
        flag.copy_(sequence, non_blocking=True)
        while flag_word[0] < i + 1:
            pass
        ways["copied_word"].append(time.perf_counter_ns() - began)
    loads = 100_000
    began = time.perf_counter_ns()
    for _ in range(loads):
        words[0]
    result["word_load_ns"] = round((time.perf_counter_ns() - began) / loads, 1)
    decoder.steps = words[0]
    return result | {f"{way}_us": spread(times[20:]) for way, times in ways.items()}


def host_alone(bench: Bench, rows: int, *, pinned: bool, repeats: int = 240) -> dict[str, Any]:
    """launch() with the model taken out of the graph: context, and the wait before it, varied one by one.

    Contexts alternate from step to step, so that the machine's mood cannot tell them apart; a wait polls
    the word as collect() does.
    """
    decoder, state = bench.decoders["fa2-tc"], bench.state
    slots = bench.fill(decoder, rows, 768)
    scratch = torch.full((rows,), state.scratch, dtype=torch.int32, device="cuda")
    tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        kernels.publish(
            tokens, scratch, state.scratch, state.carry, state.position, decoder.counter,
            decoder.mailbox.tensors["tokens"], decoder.mailbox.word,
        )  # fmt: skip
    captured, decoder.replays[rows] = decoder.replays[rows], graph.replay
    result: dict[str, Any] = {"rows": rows, "pinned": pinned}
    cores = os.sched_getaffinity(0)
    if pinned:
        os.sched_setaffinity(0, {max(cores)})
    for wait_us in (0, 1400, 7000, 25000):
        times: dict[int, list[int]] = {768: [], 4000: []}
        for i in range(repeats if wait_us < 25000 else 80):
            context = (768, 4000)[i % 2]
            decoder.lengths[slots] = context + i // 2
            decoder.planned.clear()
            until = time.perf_counter_ns() + wait_us * 1000
            while not decoder.landed(decoder.steps + 1) and time.perf_counter_ns() < until:
                pass
            began = time.perf_counter_ns()
            decoder.launch(slots)
            times[context].append(time.perf_counter_ns() - began)
            decoder.collect(decoder.steps)
        for context, column in times.items():
            result[f"wait_{wait_us}_us/context_{context}_us"] = spread(column[8:])
    torch.cuda.synchronize()
    os.sched_setaffinity(0, cores)
    decoder.replays[rows] = captured
    return result


def tokens_follow_the_word(bench: Bench, steps: int = 2000) -> dict[str, int]:
    """Small graphs in a row: whenever the word says n, all tokens of step n must be those of step n."""
    decoder, rows = bench.decoders["fa2"], 256
    slots = bench.fill(decoder, rows, 0)
    buffers, state, mailbox = decoder.rows[rows], bench.state, decoder.mailbox
    decoder.slots[:, :rows] = slots
    stamp = torch.zeros(rows, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    buffers.slots.copy_(torch.from_numpy(slots))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        stamp.add_(1)
        kernels.publish(
            stamp, buffers.slots, state.scratch, state.carry, state.position, decoder.counter,
            mailbox.tensors["tokens"], mailbox.word,
        )  # fmt: skip
    torch.cuda.synchronize()
    first, wrong = int(mailbox.words[0]), 0
    for step in range(1, steps + 1):
        graph.replay()
        while mailbox.words[0] < first + step:
            pass
        wrong += int((mailbox.arrays["tokens"][(first + step - 1) % RING, :rows] != step).any())
    torch.cuda.synchronize()
    decoder.steps = mailbox.words[0]
    return {"steps": steps, "steps_with_stale_tokens": wrong}
