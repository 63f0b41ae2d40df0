"""The Llama line: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 differ only in biases and in norms on queries
and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.distributed.group import Group
from mstar.distributed.layers import VocabEmbedding
from mstar.model.api import CausalLM, ForwardBatch, KVCache
from mstar.model.components.attention import Attention
from mstar.model.components.mlp import GatedMLP
from mstar.model.components.norm import RMSNorm
from mstar.model.components.paged import AttentionPlan
from mstar.model.components.rope import RotaryTable, Rotation
from mstar.model.families.family import Family, Target
from mstar.model.spec import ModelSpec

__all__ = ["LLAMA_LINE", "Decoder"]


class _Layer(nn.Module):
    def __init__(self, spec: ModelSpec, group: Group) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.attention = Attention(spec, group)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.mlp = GatedMLP(spec, group)

    def forward(
        self, x: Tensor, rotation: Rotation, plan: AttentionPlan, keys: Tensor, values: Tensor
    ) -> Tensor:
        x += self.attention(self.attention_norm(x), rotation, plan, keys, values)
        x += self.mlp(self.mlp_norm(x))
        return x


class Decoder(CausalLM):
    """Embedding, pre-norm layers, final norm, output projection (the embedding itself where the spec ties
    them)."""

    def __init__(self, spec: ModelSpec, group: Group, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = VocabEmbedding(spec.vocab_size, spec.hidden_size, group.shard)
        self.layers = nn.ModuleList(_Layer(spec, group) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.head = None if spec.tied else VocabEmbedding(spec.vocab_size, spec.hidden_size, group.shard)
        self._group = group
        self._dtype = dtype
        self._rotary: RotaryTable | None = None

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits [R, vocab] in the model's dtype, in the order of `batch.logits_rows`."""
        plan = AttentionPlan(batch, kv.page_size, self._dtype)
        if self._rotary is None:
            self._rotary = RotaryTable(self.spec, self._dtype, batch.tokens.device)
        rotation = self._rotary.at(batch.positions)
        x = self._group.all_reduce(self.embedding(batch.tokens))
        for layer, keys, values in zip(self.layers, kv.keys, kv.values, strict=True):
            x = layer(x, rotation, plan, keys, values)
        wanted = self.norm(x.index_select(0, batch.logits_rows))
        head = self.embedding if self.head is None else self.head
        return self._group.all_gather(head.project(wanted))[:, : self.spec.vocab_size]


def _targets(spec: ModelSpec) -> dict[str, Target]:
    targets = {
        "model.embed_tokens.weight": Target("embedding", "", "weight"),
        "model.norm.weight": Target("norm", "", "weight"),
    }
    if not spec.tied:
        targets["lm_head.weight"] = Target("head", "", "weight")
    linears = [
        *((f"self_attn.{part}_proj", "attention.qkv", part, spec.qkv_bias) for part in "qkv"),
        ("self_attn.o_proj", "attention.out", "", spec.o_bias),
        *((f"mlp.{part}_proj", "mlp.gate_up", part, spec.mlp_bias) for part in ("gate", "up")),
        ("mlp.down_proj", "mlp.down", "", spec.mlp_bias),
    ]
    norms = [("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")]
    if spec.qk_norm:
        norms += [("self_attn.q_norm", "attention.q_norm"), ("self_attn.k_norm", "attention.k_norm")]
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        for name, module, part, bias in linears:
            for kind in ("weight", "bias") if bias else ("weight",):
                targets[f"{theirs}.{name}.{kind}"] = Target(f"{ours}.{module}", part, kind)
        for name, module in norms:
            targets[f"{theirs}.{name}.weight"] = Target(f"{ours}.{module}", "", "weight")
    return targets


LLAMA_LINE = Family(build=Decoder, targets=_targets, ignored=(".rotary_emb.inv_freq",))
