"""A Qwen3-like decoder with random weights: its eager reference and the forward of one decode step."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.bench.slot_decode import kernels
from tools.bench.slot_decode.attention import Attention
from tools.bench.slot_decode.state import Rows, Shape, SlotState

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
    weights: Weights, shape: Shape, tokens: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Eager forward over one sequence, all positions at once, activations in dtype.

    Returns logits [T, vocab] and each layer's (k, v) [T, HK, D] as the paged cache holds them.
    """
    count, kv = len(tokens), []
    positions = torch.arange(count, device=tokens.device)
    sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
    causal = torch.ones(count, count, device=tokens.device).tril().bool()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight.to(dtype), shape.eps)

    x = F.embedding(tokens, weights.embedding).to(dtype)
    for layer in weights.layers:
        qkv = norm(x, layer.attention_norm) @ layer.qkv.to(dtype).T
        q, k, v = torch.split(qkv.view(count, -1, shape.head_dim), sizes, 1)
        q, k = (
            kernels.norm_rope_reference(part, weight, weights.cos, weights.sin, positions, shape.eps).to(
                dtype
            )
            for part, weight in ((q, layer.q_norm), (k, layer.k_norm))
        )
        kv.append((k, v))
        groups = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / shape.head_dim**0.5
        mixed = torch.einsum("hts,shd->thd", scores.masked_fill(~causal, -torch.inf).softmax(-1), v)
        x = x + mixed.reshape(count, -1) @ layer.out.to(dtype).T
        gate, up = (norm(x, layer.ffn_norm) @ layer.gate_up.to(dtype).T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ layer.down.to(dtype).T
    return norm(x, weights.norm) @ weights.head.to(dtype).T, kv


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
