"""A captured decode step driven by one vector of slots: device state by slot, host planner, word mailbox.

Nothing here schedules, prefills or samples other than greedily. On CPU the "graph" is a direct call and
attention is the torch reference, so that the same code is checked without a GPU.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.bench.slot_decode import kernels

RING = 4  # entries of the slot and token rings: at least depth + 2
FLOAT_WORKSPACE = 256 << 20


class Shape(NamedTuple):
    """A Qwen3-like decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_position: int
    tied: bool
    rope_theta: float = 1e6
    eps: float = 1e-6


QWEN3_06B = Shape(28, 1024, 16, 8, 128, 3072, 151936, 8192, True)


class Layer(NamedTuple):
    attention_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Weights(NamedTuple):
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor


def random_weights(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> Weights:
    """Normal weights scaled by 1 / sqrt(fan-in), so that activations stay near one in every layer."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        values = torch.randn(*size, generator=generator, device=device, dtype=torch.float32)
        return values.div_(size[-1] ** 0.5).to(dtype)

    def gain(n: int) -> Tensor:
        return (1 + 0.1 * torch.randn(n, generator=generator, device=device)).to(dtype)

    heads = shape.heads + 2 * shape.kv_heads
    layers = [
        Layer(
            attention_norm=gain(shape.hidden),
            qkv=normal(heads * shape.head_dim, shape.hidden),
            q_norm=gain(shape.head_dim),
            k_norm=gain(shape.head_dim),
            out=normal(shape.hidden, shape.heads * shape.head_dim),
            ffn_norm=gain(shape.hidden),
            gate_up=normal(2 * shape.ffn, shape.hidden),
            down=normal(shape.hidden, shape.ffn),
        )
        for _ in range(shape.layers)
    ]
    embedding = normal(shape.vocab, shape.hidden)
    head = embedding if shape.tied else normal(shape.vocab, shape.hidden) * 8
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(shape.max_position, dtype=torch.float64)[:, None] * shape.rope_theta**-pairs
    cos, sin = angles.cos().float().to(device), angles.sin().float().to(device)
    return Weights(embedding, layers, gain(shape.hidden), head, cos, sin)


def reference_forward(
    weights: Weights, shape: Shape, tokens: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Eager float32 forward over one sequence, all positions at once.

    Returns logits [T, vocab] and each layer's (k, v) [T, HK, D] as the paged cache holds them.
    """
    count, kv = len(tokens), []
    positions = torch.arange(count, device=tokens.device)
    sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
    causal = torch.ones(count, count, device=tokens.device).tril().bool()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight.float(), shape.eps)

    x = F.embedding(tokens, weights.embedding).float()
    for layer in weights.layers:
        qkv = norm(x, layer.attention_norm) @ layer.qkv.float().T
        q, k, v = qkv.view(count, -1, shape.head_dim).split(sizes, 1)
        q, k = (
            kernels.norm_rope_reference(part, weight, weights.cos, weights.sin, positions, shape.eps)
            for part, weight in ((q, layer.q_norm), (k, layer.k_norm))
        )
        kv.append((k, v))
        groups = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / shape.head_dim**0.5
        mixed = torch.einsum("hts,shd->thd", scores.masked_fill(~causal, -torch.inf).softmax(-1), v)
        x = x + mixed.reshape(count, -1) @ layer.out.float().T
        gate, up = (norm(x, layer.ffn_norm) @ layer.gate_up.float().T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ layer.down.float().T
    return norm(x, weights.norm) @ weights.head.float().T, kv


class SlotState:
    """What a request keeps on the device, by slot; index `slots` is the scratch slot of padding rows.

    Everything unused is poisoned: -1 in tables, positions and carries, NaN in the cache. Page 0 belongs
    to the scratch slot.
    """

    def __init__(
        self,
        shape: Shape,
        slots: int,
        pages: int,
        pages_per_slot: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.scratch, self.page_size = slots, page_size
        self.block_table = torch.full((slots + 1, pages_per_slot), -1, dtype=torch.int32, device=device)
        self.position = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
        self.carry = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
        self.block_table[slots, 0] = self.position[slots] = self.carry[slots] = 0
        size = (pages, 2, page_size, shape.kv_heads, shape.head_dim)
        self.cache = [torch.full(size, torch.nan, dtype=dtype, device=device) for _ in range(shape.layers)]


class Rows:
    """The buffers one captured bucket reads and writes; their addresses never change."""

    def __init__(self, rows: int, state: SlotState, shape: Shape) -> None:
        device, dtype = state.carry.device, state.cache[0].dtype
        self.count = rows
        self.slots = torch.full((rows,), state.scratch, dtype=torch.int32, device=device)
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self.indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.indices = torch.zeros(rows * state.block_table.shape[1], dtype=torch.int32, device=device)
        self.last_page_len = torch.ones(rows, dtype=torch.int32, device=device)
        self.query = torch.empty(rows, shape.heads, shape.head_dim, dtype=dtype, device=device)
        self.mixed = torch.empty_like(self.query)


class Attention(Protocol):
    """Paged decode attention of one bucket."""

    def plan(self, indptr: np.ndarray) -> None:
        """Partition the work: indptr int32 [B + 1] on the host, in pages."""

    def run(self, rows: Rows, cache: Tensor) -> None:
        """rows.query [B, HQ, D] over the cache into rows.mixed."""


class TorchAttention:
    """The reference: reads only what a paged decode kernel would be given."""

    def __init__(self) -> None:
        self.plans: list[list[int]] = []

    def plan(self, indptr: np.ndarray) -> None:
        self.plans.append(indptr.tolist())

    def run(self, rows: Rows, cache: Tensor) -> None:
        rows.mixed.copy_(
            kernels.paged_attention_reference(
                rows.query, cache, rows.indptr, rows.indices, rows.last_page_len
            )
        )


class FlashInferAttention:
    """FlashInfer's FA2 decode in graph mode, planned on the host from page counts alone.

    `plan` calls the compiled planner itself: the wrapper's `plan` would also copy indptr, indices and
    last page lengths, which the captured step derives on the device. The planner writes its work list
    into pinned memory and enqueues one copy of it, so a list that is still to be copied must not be
    overwritten: plans take turns over `staging` buffers.
    """

    def __init__(
        self,
        rows: Rows,
        state: SlotState,
        shape: Shape,
        workspace: Tensor,
        *,
        tensor_cores: bool,
        staging: int = RING,
    ) -> None:
        import flashinfer

        self.shape, self.page_size, self.rows, self.tensor_cores = shape, state.page_size, rows, tensor_cores
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, use_tensor_cores=tensor_cores, backend="fa2",
            paged_kv_indptr_buffer=rows.indptr, paged_kv_indices_buffer=rows.indices,
            paged_kv_last_page_len_buffer=rows.last_page_len,
        )  # fmt: skip
        ones = torch.ones(rows.count, dtype=torch.int32)
        indptr = torch.arange(rows.count + 1, dtype=torch.int32)
        self.plan_in_full(indptr, ones)
        self.info = list(self.wrapper._plan_info)
        self.planner = self.wrapper._cached_module.plan
        self.buffers = self.wrapper._float_workspace_buffer, self.wrapper._int_workspace_buffer
        staged = self.wrapper._pin_memory_int_workspace_buffer
        self.staging = [torch.empty_like(staged, pin_memory=True) for _ in range(staging)]
        self.turn = 0
        empty = torch.empty(0, dtype=rows.query.dtype)
        size = (shape.heads, shape.kv_heads, state.page_size, True)
        # the planner's order of arguments; the tensor-core path ignores the lengths (ones) it asks for
        self.before: tuple[Any, ...]
        self.after: tuple[Any, ...]
        if tensor_cores:
            self.before = (indptr.clone(),)
            self.after = (ones, rows.count, rows.count, *size, shape.head_dim, shape.head_dim,
                          False, -1, -1, False, 0, 0)  # fmt: skip
        else:
            self.before = ()
            self.after = (rows.count, *size, -1, 0.0, shape.head_dim, shape.head_dim, empty, empty)

    def plan_in_full(self, indptr: Tensor, last_page_len: Tensor) -> None:
        """The wrapper's own plan(), all copies included."""
        shape, dtype = self.shape, self.rows.query.dtype
        self.wrapper.plan(
            indptr, self.rows.indices[: int(indptr[-1])], last_page_len, shape.heads, shape.kv_heads,
            shape.head_dim, self.page_size, q_data_type=dtype, kv_data_type=dtype,
        )  # fmt: skip

    def plan_fast(self, indptr: Tensor, last_page_len: Tensor) -> None:
        """FlashInfer's public short plan, which skips the copies."""
        import flashinfer

        shape, dtype = self.shape, self.rows.query.dtype
        flashinfer.fast_decode_plan(
            self.wrapper, indptr, self.rows.indices[:0], last_page_len, shape.heads, shape.kv_heads,
            shape.head_dim, self.page_size, q_data_type=dtype, kv_data_type=dtype,
            global_override_indptr_cpu=indptr,
        )  # fmt: skip

    def plan(self, indptr: np.ndarray) -> None:
        self.turn = (self.turn + 1) % len(self.staging)
        self.last_info = self.planner(
            *self.buffers, self.staging[self.turn], *self.before, torch.from_numpy(indptr), *self.after
        )

    def run(self, rows: Rows, cache: Tensor) -> None:
        self.wrapper.run(rows.query, cache, out=rows.mixed)


def forward(weights: Weights, shape: Shape, rows: Rows, state: SlotState, attention: Attention) -> Tensor:
    """Logits [B, vocab] of one new token a row."""
    if rows.ids.is_cuda:
        from flashinfer.activation import silu_and_mul
        from flashinfer.norm import fused_add_rmsnorm
    else:

        def silu_and_mul(x: Tensor) -> Tensor:
            return F.silu(x[:, : shape.ffn]) * x[:, shape.ffn :]

        def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
            residual += x
            x.copy_(F.rms_norm(residual, residual.shape[-1:], weight, eps))

    hidden = F.embedding(rows.ids, weights.embedding)
    residual = torch.zeros_like(hidden)
    for layer, cache in zip(weights.layers, state.cache, strict=True):
        fused_add_rmsnorm(hidden, residual, layer.attention_norm, shape.eps)
        kernels.norm_rope_store(
            F.linear(hidden, layer.qkv), rows.query, cache, layer.q_norm, layer.k_norm,
            weights.cos, weights.sin, rows.positions, rows.indptr, rows.indices, shape.eps,
        )  # fmt: skip
        attention.run(rows, cache)
        hidden = F.linear(rows.mixed.view(rows.count, -1), layer.out)
        fused_add_rmsnorm(hidden, residual, layer.ffn_norm, shape.eps)
        hidden = F.linear(silu_and_mul(F.linear(hidden, layer.gate_up)), layer.down)
    fused_add_rmsnorm(hidden, residual, weights.norm, shape.eps)
    return F.linear(hidden, weights.head)


class Mailbox:
    """One shared mapping that host and device both reach: word, slot ring, token ring, binds, grants.

    The device writes tokens [RING, capacity] and then the word (steps done, 64 bits at offset 0); the
    host writes the rest. On a GPU the mapping is pinned with cudaHostRegister, and kernels address it.
    """

    def __init__(self, capacity: int, grants: int, *, pinned: bool) -> None:
        fields: dict[str, tuple[int, ...]] = {"slots": (RING, capacity), "tokens": (RING, capacity)}
        fields |= {"binds": (RING, capacity, 3), "grants": (RING, grants, 3)}
        offsets, end = {}, 4096
        for name, size in fields.items():
            offsets[name] = end
            end += -(-4 * int(np.prod(size)) // 4096) * 4096
        self.mapping = mmap.mmap(-1, end)
        view = memoryview(self.mapping)
        self.words = view[:8].cast("Q")
        self.word = torch.frombuffer(self.mapping, dtype=torch.int64, count=1)
        self.tensors, self.arrays = {}, {}
        if pinned:
            whole = torch.frombuffer(self.mapping, dtype=torch.uint8)
            status = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), end, 2)
            if int(status) != 0:
                raise RuntimeError(f"cudaHostRegister of {end} bytes failed with {status}")
        for name, size in fields.items():
            flat = torch.frombuffer(
                self.mapping, dtype=torch.int32, count=int(np.prod(size)), offset=offsets[name]
            )
            self.tensors[name] = flat.view(size)
            self.arrays[name] = self.tensors[name].numpy()


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
        self.riders = [np.empty(0, dtype=np.int32)] * RING
        self.rows = {bucket: Rows(bucket, state, shape) for bucket in self.buckets}
        self.attention = {bucket: attention(rows) for bucket, rows in self.rows.items()}
        self.indptr = {bucket: np.zeros(bucket + 1, dtype=np.int32) for bucket in self.buckets}
        self.planned: dict[int, bytes] = {}
        self.bucket_of = np.searchsorted(self.buckets, np.arange(capacity + 1)).tolist()
        self.slots, self.tokens = self.mailbox.arrays["slots"], self.mailbox.arrays["tokens"]
        self.slots[:] = state.scratch
        self.replays = {bucket: self._capture(bucket) for bucket in reversed(self.buckets)}

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

    def _capture(self, bucket: int) -> Callable[[], None]:
        if not self.state.carry.is_cuda:
            return lambda: self.step(bucket)
        graph = torch.cuda.CUDAGraph()
        self.attention[bucket].plan(np.arange(bucket + 1, dtype=np.int32))
        self.step(bucket)  # on scratch rows only: compiles and warms up, changes no request
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self.step(bucket)
        self.counter.zero_()
        torch.cuda.synchronize()
        self.mailbox.words[0] = 0
        return graph.replay

    def bind(self, binds: np.ndarray, grants: np.ndarray) -> None:
        """Rows join before the next step: at most one call a step.

        binds int32 [n, 3] are (slot, position, carry), grants int32 [m, 3] are (slot, index, page).
        """
        turn = self.steps % RING
        for name, table in (("binds", binds), ("grants", grants)):
            self.mailbox.arrays[name][turn, : len(table)] = table
        self.lengths[binds[:, 0]] = binds[:, 1]
        kernels.bind(
            self.mailbox.tensors["binds"][turn], self.mailbox.tensors["grants"][turn], len(binds),
            len(grants), self.state.carry, self.state.position, self.state.block_table,
        )  # fmt: skip

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
