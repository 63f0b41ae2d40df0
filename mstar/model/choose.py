"""What a CPU runs a model best with: dtype, threads, layout of the weights.

Measured, where there is a choice to make; settled where there is none:

* Threads: one core is left to the gateway, which has to answer while a step runs. On two cores that
  leaves one, and one thread it is: two threads meet at a barrier after every layer, so that any other
  work on either core stalls both (on two busy cores a step of SmolLM2 took 2 to 5 times as long with two
  threads as with one). With more cores the counts in between are timed, and more threads have to earn
  their keep.
* Dtype: bfloat16 where the processor multiplies it natively and the timing shows it; float32 otherwise
  (with AVX2 alone bfloat16 runs at 10 GFLOP/s a core, float32 at 70).
* Layout: a second copy of the wide layers for small batches, where memory is plenty (see `matmul`).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from mstar.distributed.matmul import Layout, Multiply, lay_out, packs
from mstar.model.spec import ModelSpec

__all__ = ["CpuChoice", "choose_cpu", "choose_layout", "decide", "thread_counts"]

_WORTH = 1.15
_ROWS = (1, 16)
_STREAMED = 48 << 20
_REPEATS = 3
_MEMORY_SHARE = 8

Timing = Callable[[torch.dtype, int], float]


class CpuChoice(NamedTuple):
    """What to load the model with, and to give torch.set_num_threads before the first step."""

    dtype: torch.dtype
    threads: int
    layout: Layout


@functools.lru_cache(maxsize=8)
def choose_cpu(spec: ModelSpec) -> CpuChoice:
    """The choice for `spec` on this machine; at most about a second the first time, remembered after that."""
    cores = len(os.sched_getaffinity(0))
    dtypes = [torch.float32] + [torch.bfloat16] * packs(torch.bfloat16)
    dtype, threads = decide(dtypes, thread_counts(cores), functools.partial(_seconds, spec))
    return CpuChoice(dtype, threads, choose_layout(spec, dtype))


def thread_counts(cores: int) -> list[int]:
    """Counts worth timing on `cores` cores: powers of two, and all cores but one."""
    most = max(cores - 1, 1)
    powers = [1 << n for n in range(most.bit_length()) if 1 << n < most]
    return [*powers, most]


def decide(dtypes: list[torch.dtype], threads: list[int], seconds: Timing) -> tuple[torch.dtype, int]:
    """The fewest threads, then the first dtype, that no other one beats by 15 %. Nothing is timed without
    a choice.

    `seconds(dtype, threads)` times a step's multiplications.
    """
    timed: dict[tuple[torch.dtype, int], float] = {}

    def cost(dtype: torch.dtype, count: int) -> float:
        if (dtype, count) not in timed:
            timed[dtype, count] = seconds(dtype, count)
        return timed[dtype, count]

    best = dtypes[0], threads[0]
    for count in threads[1:]:
        if cost(dtypes[0], count) * _WORTH < cost(*best):
            best = dtypes[0], count
    for dtype in dtypes[1:]:
        if cost(dtype, best[1]) * _WORTH < cost(*best):
            best = dtype, best[1]
    return best


def choose_layout(spec: ModelSpec, dtype: torch.dtype) -> Layout:
    """COLUMNS_AND_BLOCKS where the second copy of wide layers takes at most an eighth of the free memory."""
    second = (spec.layers * 2 * spec.ffn_size + spec.vocab_size) * spec.hidden_size * dtype.itemsize
    return Layout.COLUMNS_AND_BLOCKS if second * _MEMORY_SHARE <= _available() else Layout.COLUMNS


def _available() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    return 0


def _seconds(spec: ModelSpec, dtype: torch.dtype, threads: int) -> float:
    """Seconds of multiplying 1 and 16 rows with gate and up matrices that stream from memory, best of
    three."""
    shape = (min(2 * spec.ffn_size, 4096), min(spec.hidden_size, 1024))
    copies = max(_STREAMED // (shape[0] * shape[1] * dtype.itemsize), 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            weight = torch.ones(shape, dtype=dtype)
            layers = [lay_out(weight, None, Layout.COLUMNS_AND_BLOCKS).multiply for _ in range(copies)]
            return sum(_best(layers, torch.ones(rows, shape[1], dtype=dtype)) for rows in _ROWS)
    finally:
        torch.set_num_threads(before)


def _best(layers: list[Multiply], x: torch.Tensor) -> float:
    took = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        for multiply in layers:
            multiply(x)
        took.append(time.perf_counter() - started)
    return min(took)
