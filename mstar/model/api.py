"""What an engine hands to a model and gets back: a packed batch, a paged cache, logits."""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mstar.distributed.memory import huge_empty
from mstar.distributed.shard import WHOLE, Shard
from mstar.model.spec import ModelSpec

__all__ = ["CausalLM", "ForwardBatch", "KVCache"]


class ForwardBatch(NamedTuple):
    """B rows of token ranges, packed row after row into T tokens; R of them want logits.

    tokens, positions, slot_mapping: int64 [T]; slot_mapping is page * page_size + offset, where the
    token's key and value go. query_lens, kv_lens: B ints on the host, new tokens and tokens in the cache
    after the step. block_tables: int32 [B, P], page ids, P >= ceil(max(kv_lens) / page_size), entries past
    a row's end unspecified. logits_rows: int64 [R], indices into T.
    """

    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_lens: list[int]
    kv_lens: list[int]
    block_tables: Tensor
    logits_rows: Tensor


class KVCache:
    """Keys and values of every layer in pages of `page_size` tokens.

    `keys[layer]`, `values[layer]`: [kv_heads, pages * page_size, head_dim], a head's tokens side by side,
    so that attention over a row whose pages follow each other needs no copy. A slot is page * page_size +
    offset.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], page_size: int) -> None:
        self.keys = keys
        self.values = values
        self.page_size = page_size
        self.pages = keys[0].shape[1] // page_size

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        shard: Shard = WHOLE,
    ) -> KVCache:
        """Room for `pages` pages of this rank's heads, zeroed; on a CPU the memory is touched as it is
        used."""
        heads = len(shard.replicated_span(spec.kv_heads, "num_key_value_heads"))
        shape = (spec.layers, 2, heads, pages * page_size, spec.head_dim)
        # Anonymous memory reads as zeros: a slot past a row's end may be read (and masked), so it must be
        # finite.
        store = (
            huge_empty(shape, dtype)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=dtype, device=device)
        )
        return cls([layer[0] for layer in store], [layer[1] for layer in store], page_size)

    @staticmethod
    def nbytes_per_page(spec: ModelSpec, page_size: int, dtype: torch.dtype, *, shard: Shard = WHOLE) -> int:
        """Bytes that one page takes over all layers."""
        heads = len(shard.replicated_span(spec.kv_heads, "num_key_value_heads"))
        return spec.layers * 2 * heads * page_size * spec.head_dim * dtype.itemsize


class CausalLM(nn.Module, abc.ABC):
    """A decoder: tokens in, logits out, keys and values left in the cache. The caller enters inference
    mode."""

    spec: ModelSpec

    @abc.abstractmethod
    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits [R, vocab] in the model's dtype, in the order of `batch.logits_rows`."""
