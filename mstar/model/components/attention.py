"""Grouped-query attention over a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.distributed.group import Group
from mstar.distributed.layers import ColumnLinear, Part, RowLinear
from mstar.model.components.norm import RMSNorm
from mstar.model.components.paged import AttentionPlan, GatheredRows, PrefillRow, RunRow
from mstar.model.components.rope import Rotation
from mstar.model.spec import ModelSpec

__all__ = ["Attention"]


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
        count, heads, kv_heads = x.shape[0], self._heads, self._kv_heads
        qkv = self.qkv(x).view(count, heads + 2 * kv_heads, self._head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q.copy_(self.q_norm(q))
            k.copy_(self.k_norm(k))
        rotation.apply(qkv[:, : heads + kv_heads])
        keys.index_copy_(1, plan.slot_mapping, k.transpose(0, 1))
        values.index_copy_(1, plan.slot_mapping, v.transpose(0, 1))
        # The query heads of one key/value head are one matrix: its keys are read once for all of them.
        q = q.mul(self._scale).view(count, kv_heads, heads // kv_heads, self._head_dim)
        out = torch.empty_like(q)
        for prefill in plan.prefills:
            _prefill(prefill, q, k, v, keys, values, out)
        if plan.runs:
            _in_place(plan.runs, q, keys, values, out)
        for rows in plan.gathered:
            _gathered(rows, q, keys, values, out)
        return self._group.all_reduce(self.out(out.view(count, -1)))


# Shapes below: q, out [T, kv_heads, group, head_dim], q already scaled; k, v [T, kv_heads, head_dim], the
# new tokens'; keys, values [kv_heads, slots, head_dim].


def _prefill(
    row: PrefillRow, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, out: Tensor
) -> None:
    own = row.tokens
    if row.run is not None:
        seen_k, seen_v = (cache.narrow(1, *row.run) for cache in (keys, values))
    elif row.slots is not None:
        seen_k, seen_v = keys.index_select(1, row.slots), values.index_select(1, row.slots)
    else:
        seen_k, seen_v = k[own].transpose(0, 1), v[own].transpose(0, 1)
    attended = functional.scaled_dot_product_attention(
        q[own].flatten(1, 2).transpose(0, 1).unsqueeze(0),
        seen_k.unsqueeze(0),
        seen_v.unsqueeze(0),
        attn_mask=row.mask,
        is_causal=row.mask is None,
        scale=1.0,
        enable_gqa=q.shape[2] > 1,
    )
    out[own] = attended[0].transpose(0, 1).view(out[own].shape)


def _in_place(rows: list[RunRow], q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    # Views cost as much as the arithmetic of a short row: they are made with the cheapest call, and once.
    queries, targets, columns = q.unbind(), out.unbind(), keys.transpose(1, 2)
    for token, runs in rows:
        own, target = queries[token], targets[token]
        if len(runs) == 1:
            start, length = runs[0]
            weights = torch.softmax(torch.bmm(own, columns.narrow(2, start, length)), dim=-1)
            torch.bmm(weights, values.narrow(1, start, length), out=target)
            continue
        scores = [torch.bmm(own, columns.narrow(2, start, length)) for start, length in runs]
        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1)
        target.zero_()
        for part, (start, length) in zip(weights.split([r.length for r in runs], -1), runs, strict=True):
            target.baddbmm_(part, values.narrow(1, start, length))


def _gathered(rows: GatheredRows, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    own = q if rows.tokens is None else q.index_select(0, rows.tokens)
    count, kv_heads, group, head_dim = own.shape
    shape = (kv_heads * count, rows.length, head_dim)
    seen_k = keys.index_select(1, rows.slots).view(shape)
    seen_v = values.index_select(1, rows.slots).view(shape)
    own = own.transpose(0, 1).reshape(kv_heads * count, group, head_dim)
    scores = torch.bmm(own, seen_k.transpose(1, 2))
    if rows.mask is not None:
        scores.view(kv_heads, count, group, rows.length).add_(rows.mask)
    attended = torch.bmm(torch.softmax(scores, dim=-1), seen_v)
    attended = attended.view(kv_heads, count, group, head_dim).transpose(0, 1)
    if rows.tokens is None:
        out.copy_(attended)
    else:
        out.index_copy_(0, rows.tokens, attended)
