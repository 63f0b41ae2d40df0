"""Paged decode attention of one bucket: FlashInfer planned on the host, and the torch reference."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tools.bench.slot_decode import kernels
from tools.bench.slot_decode.mailbox import RING
from tools.bench.slot_decode.state import Rows, Shape, SlotState

FLOAT_WORKSPACE = 256 << 20


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
