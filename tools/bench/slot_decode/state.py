"""Device state by slot, and the fixed buffers of one captured bucket."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
