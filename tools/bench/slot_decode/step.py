"""A captured decode step driven by one vector of slots, planned on the host, landed through a mailbox.

Nothing here schedules, prefills or samples other than greedily. On CPU the "graph" is a direct call and
attention is the torch reference, so that the same code is checked without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tools.bench.slot_decode import kernels
from tools.bench.slot_decode.attention import Attention
from tools.bench.slot_decode.mailbox import RING, Mailbox
from tools.bench.slot_decode.model import Weights, forward
from tools.bench.slot_decode.state import Rows, Shape, SlotState


class Stages(NamedTuple):
    """Host nanoseconds of one launch."""

    prepare: int
    plan: int
    replay: int


class SlotDecoder:
    """Launches captured decode steps by slot vector and collects their tokens by polling a word.

    Steps are numbered from 1. `lengths` int64 [S + 1] is the host's mirror of the positions: it is what a
    scheduler knows anyway, and all that planning needs.
    """

    def __init__(
        self,
        weights: Weights,
        shape: Shape,
        state: SlotState,
        buckets: Sequence[int],
        attention: Callable[[Rows], Attention],
        *,
        horizon: int = 1,
    ) -> None:
        """horizon: plan for page counts rounded up to it (pages); 1 plans exactly."""
        self.weights, self.shape, self.state, self.horizon = weights, shape, state, horizon
        self.buckets = sorted(buckets)
        capacity = self.buckets[-1]
        self.mailbox = Mailbox(capacity, 16 * capacity, pinned=state.carry.is_cuda)
        self.counter = torch.zeros(1, dtype=torch.int64, device=state.carry.device)
        self.lengths = np.zeros(state.scratch + 1, dtype=np.int64)
        self.steps = self.plans = 0
        self.bound = -1
        self.riders: list[np.ndarray] = [np.empty(0, dtype=np.int32)] * RING
        self.rows = {bucket: Rows(bucket, state, shape) for bucket in self.buckets}
        self.attention = {bucket: attention(rows) for bucket, rows in self.rows.items()}
        self.indptr = {bucket: np.zeros(bucket + 1, dtype=np.int32) for bucket in self.buckets}
        self.planned: dict[int, bytes] = {}
        self.bucket_of = np.searchsorted(self.buckets, np.arange(capacity + 1)).tolist()
        self.slots, self.tokens = self.mailbox.arrays["slots"], self.mailbox.arrays["tokens"]
        self.slots[:] = state.scratch
        self.apply_binds = self._capture(self._bind)
        self.replays = {
            bucket: self._capture(partial(self.step, bucket)) for bucket in reversed(self.buckets)
        }

    def step(self, bucket: int) -> None:
        """Enqueue every kernel of one step: what is captured."""
        rows, state, mailbox = self.rows[bucket], self.state, self.mailbox
        kernels.begin_rows(
            self.counter, mailbox.tensors["slots"], rows.slots, state.carry, state.position, rows.ids,
            rows.positions, rows.indptr, rows.last_page_len, state.page_size,
        )  # fmt: skip
        kernels.gather_pages(rows.slots, state.block_table, rows.indptr, rows.indices)
        logits = forward(self.weights, self.shape, rows, state, self.attention[bucket])
        kernels.publish(
            logits.argmax(-1), rows.slots, state.scratch, state.carry, state.position, self.counter,
            mailbox.tensors["tokens"], mailbox.word,
        )  # fmt: skip

    def _bind(self) -> None:
        tensors, state = self.mailbox.tensors, self.state
        kernels.bind(
            self.counter, tensors["counts"], tensors["binds"], tensors["grants"],
            state.carry, state.position, state.block_table,
        )  # fmt: skip

    def _capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """A graph's replay; before capture everything runs once, on scratch rows and empty rings only."""
        if not self.state.carry.is_cuda:
            return enqueue
        graph = torch.cuda.CUDAGraph()
        enqueue()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            enqueue()
        self.counter.zero_()
        torch.cuda.synchronize()
        self.mailbox.words[0] = 0
        return graph.replay

    def bind(self, binds: np.ndarray, grants: np.ndarray) -> None:
        """Rows join before the next step: at most one call a step.

        binds int32 [n, 3] are (slot, position, carry), grants int32 [m, 3] are (slot, index, page).
        """
        if self.bound == self.steps:
            raise ValueError(f"step {self.steps + 1} already has its binds: launch it before the next call")
        self.bound, turn = self.steps, self.steps % RING
        for name, table in (("binds", binds), ("grants", grants)):
            self.mailbox.arrays[name][turn, : len(table)] = table
        self.mailbox.arrays["counts"][turn] = len(binds), len(grants)
        self.lengths[binds[:, 0]] = binds[:, 1]
        self.apply_binds()

    def launch(self, slots: np.ndarray, clock: Callable[[], int] = time.perf_counter_ns) -> Stages:
        """Plan and launch the next step for rows slots int32 [n], n <= the largest bucket."""
        began, count = clock(), len(slots)
        bucket = self.buckets[self.bucket_of[count]]
        record, indptr = self.slots[self.steps % RING], self.indptr[bucket]
        record[:count] = slots
        record[count:bucket] = self.state.scratch
        pages = self.lengths[slots] // self.state.page_size + 1
        if self.horizon > 1:
            pages = -(-pages // self.horizon) * self.horizon
        np.cumsum(pages, out=indptr[1 : count + 1])
        if count < bucket:
            indptr[count + 1 :] = np.arange(1, bucket - count + 1) + indptr[count]
        key = indptr.tobytes()
        prepared = clock()
        if self.planned.get(bucket) != key:  # the work list is a function of the page counts alone
            self.attention[bucket].plan(indptr)
            self.planned[bucket] = key
            self.plans += 1
        planned = clock()
        self.replays[bucket]()
        self.lengths[slots] += 1
        self.riders[self.steps % RING] = slots
        self.steps += 1
        return Stages(prepared - began, planned - prepared, clock() - planned)

    def landed(self, step: int) -> bool:
        return self.mailbox.words[0] >= step

    def collect(self, step: int, deadline: float = 10.0) -> tuple[np.ndarray, np.ndarray]:
        """(slots, tokens) of a step, polled for; the views last until step + RING is launched."""
        words, tries = self.mailbox.words, 0
        limit = time.monotonic() + deadline
        while words[0] < step:
            tries += 1
            if tries % 65536 == 0 and time.monotonic() > limit:
                raise TimeoutError(f"step {step} did not land within {deadline} s: the word says {words[0]}")
        slots = self.riders[(step - 1) % RING]
        return slots, self.tokens[(step - 1) % RING, : len(slots)]
