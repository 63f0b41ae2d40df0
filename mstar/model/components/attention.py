"""Grouped-query attention over a paged cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.distributed.group import Group
from mstar.distributed.layers import ColumnLinear, Part, RowLinear
from mstar.model.api import ForwardBatch
from mstar.model.components.norm import RMSNorm
from mstar.model.components.rope import Rotation
from mstar.model.spec import ModelSpec

__all__ = ["Attention", "AttentionPlan"]


class _Prefill(NamedTuple):
    """A row with several new tokens: where they lie in the batch, its cached slots, and what each may see."""

    tokens: slice
    slots: Tensor | None
    mask: Tensor | None


class _Decode(NamedTuple):
    """Rows with one new token, padded to the longest: batch indices [D], slots [D * L], mask [D, 1, L]."""

    tokens: Tensor | None
    slots: Tensor
    mask: Tensor | None
    length: int


class AttentionPlan:
    """Which cached tokens each row of a batch attends to: computed once a step, used by every layer."""

    def __init__(self, batch: ForwardBatch, page_size: int, dtype: torch.dtype) -> None:
        self.slot_mapping = batch.slot_mapping
        self.prefills: list[_Prefill] = []
        self.decode: _Decode | None = None
        decoding, starts = [], []
        at = 0
        for row, (query_len, kv_len) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
            if query_len == 1:
                decoding.append(row)
                starts.append(at)
            elif query_len:
                self.prefills.append(
                    _prefill(batch, row, slice(at, at + query_len), kv_len, page_size, dtype)
                )
            at += query_len
        if decoding:
            self.decode = _decode(batch, decoding, starts, page_size, dtype)


class Attention(nn.Module):
    """Queries, keys and values from one multiplication; keys and values go to the cache, and are read from
    it."""

    def __init__(self, spec: ModelSpec, group: Group) -> None:
        super().__init__()
        shard = group.shard
        queries = Part.heads(spec.heads, spec.head_dim, shard, "num_attention_heads")
        keys = Part.heads(spec.kv_heads, spec.head_dim, shard, "num_key_value_heads")
        parts = {"q": queries, "k": keys, "v": keys}
        self.qkv = ColumnLinear(spec.hidden_size, parts, bias=spec.qkv_bias)
        width = spec.heads * spec.head_dim
        self.out = RowLinear(width, spec.hidden_size, shard, columns=queries.rows, bias=spec.o_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_eps) if spec.qk_norm else None
        self._heads = len(queries.rows) // spec.head_dim
        self._kv_heads = len(keys.rows) // spec.head_dim
        self._head_dim = spec.head_dim
        self._scale = spec.head_dim**-0.5
        self._group = group

    def forward(
        self, x: Tensor, rotation: Rotation, plan: AttentionPlan, keys: Tensor, values: Tensor
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]; keys, values [kv_heads, slots, head_dim] of this layer are
        written."""
        heads, kv_heads = self._heads, self._kv_heads
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self._head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q.copy_(self.q_norm(q))
            k.copy_(self.k_norm(k))
        rotation.apply(qkv[:, : heads + kv_heads])
        keys.index_copy_(1, plan.slot_mapping, k.transpose(0, 1))
        values.index_copy_(1, plan.slot_mapping, v.transpose(0, 1))
        out = torch.empty_like(x[:, :1]).expand(x.shape[0], heads * self._head_dim).contiguous()
        for prefill in plan.prefills:
            rows = prefill.tokens
            out[rows] = self._prefill(prefill, q[rows], k[rows], v[rows], keys, values)
        if plan.decode is not None:
            if plan.decode.tokens is None:
                out = self._decode(plan.decode, q, keys, values)
            else:
                chosen = q.index_select(0, plan.decode.tokens)
                out.index_copy_(0, plan.decode.tokens, self._decode(plan.decode, chosen, keys, values))
        return self._group.all_reduce(self.out(out))

    def _prefill(
        self, row: _Prefill, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        if row.slots is None:
            cached_k, cached_v = k.transpose(0, 1), v.transpose(0, 1)
        else:
            cached_k, cached_v = keys.index_select(1, row.slots), values.index_select(1, row.slots)
        attended = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            cached_k.unsqueeze(0),
            cached_v.unsqueeze(0),
            attn_mask=row.mask,
            is_causal=row.mask is None,
            scale=self._scale,
            enable_gqa=self._heads != self._kv_heads,
        )
        return attended[0].transpose(0, 1).reshape(q.shape[0], -1)

    def _decode(self, rows: _Decode, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # The query heads of one kv head are one matrix: its keys are read once for all of them.
        count, group = q.shape[0], self._heads // self._kv_heads
        shape = (self._kv_heads * count, rows.length, self._head_dim)
        cached_k = keys.index_select(1, rows.slots).view(shape)
        cached_v = values.index_select(1, rows.slots).view(shape)
        grouped = q.view(count, self._kv_heads, group, self._head_dim).transpose(0, 1)
        grouped = grouped.reshape(self._kv_heads * count, group, self._head_dim) * self._scale
        scores = torch.bmm(grouped, cached_k.transpose(1, 2)).view(self._kv_heads, count, group, rows.length)
        if rows.mask is not None:
            scores += rows.mask
        weights = torch.softmax(scores, dim=-1).view(self._kv_heads * count, group, rows.length)
        attended = torch.bmm(weights, cached_v).view(self._kv_heads, count, group, self._head_dim)
        return attended.transpose(0, 1).reshape(count, -1)


def _slots(tables: Tensor, page_size: int, length: int) -> Tensor:
    """tables int32 [B, P] -> slots int64 [B, length] of tokens 0 .. length - 1."""
    pages = tables[:, : -(-length // page_size)].long().unsqueeze(-1)
    return (pages * page_size + torch.arange(page_size, device=tables.device)).flatten(1)[:, :length]


def _prefill(
    batch: ForwardBatch, row: int, tokens: slice, kv_len: int, page_size: int, dtype: torch.dtype
) -> _Prefill:
    count = tokens.stop - tokens.start
    if count == kv_len:
        return _Prefill(tokens, None, None)
    device = batch.tokens.device
    slots = _slots(batch.block_tables[row : row + 1], page_size, kv_len)[0]
    # Bottom-right causal: new token i, at position kv_len - count + i, sees everything up to itself.
    seen = torch.ones(count, kv_len, dtype=torch.bool, device=device).tril_(kv_len - count)
    mask = torch.zeros(count, kv_len, dtype=dtype, device=device).masked_fill_(
        seen.logical_not_(), float("-inf")
    )
    return _Prefill(tokens, slots, mask)


def _decode(
    batch: ForwardBatch, rows: list[int], starts: list[int], page_size: int, dtype: torch.dtype
) -> _Decode:
    device = batch.tokens.device
    every = len(rows) == len(batch.query_lens)
    tables = batch.block_tables if every else batch.block_tables[rows]
    lengths = [batch.kv_lens[row] for row in rows]
    longest = max(lengths)
    mask = None
    # Entries past a row's end are unspecified: read slot 0 there, and mask it.
    if min(lengths) != longest:
        ends = torch.tensor(lengths, device=device)
        past = torch.arange(longest, device=device) >= ends.unsqueeze(1)
        slots = _slots(tables, page_size, longest).masked_fill_(past, 0)
        mask = (
            torch.zeros(past.shape, dtype=dtype, device=device).masked_fill_(past, float("-inf")).unsqueeze(1)
        )
    else:
        slots = _slots(tables, page_size, longest)
    tokens = None if every else torch.tensor(starts, device=device)
    return _Decode(tokens, slots.flatten(), mask, longest)
