"""Driving a model over a paged cache the way an engine does, and tiny transformers models to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mstar.distributed.shard import WHOLE, Shard
from mstar.model.api import CausalLM, ForwardBatch, KVCache

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 5e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False, "rope_parameters": ROPE}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {**ROPE, "rope_theta": 1e5}}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": ROPE}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24, "rope_parameters": ROPE}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "head_dim": None, "rope_parameters": ROPE}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32, "rope_parameters": ROPE}),
    "multi-head": ("Llama", {"num_key_value_heads": 4, "rope_parameters": ROPE}),
}


def reference(family: str, directory: Path, seed: int = 0) -> Any:
    """A tiny random transformers model of `family`, saved into `directory` and returned in float32."""
    import transformers

    kind, changes = FAMILIES[family]
    values = {
        key: value
        for key, value in {**SHAPE, **changes}.items()
        if value is not None or key == "sliding_window"
    }
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**values)
    ).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            # Fresh norms are all ones and biases all zeros: a mix-up of them would not show.
            tensor.copy_(torch.rand_like(tensor) + 0.5 if "norm" in name else torch.randn_like(tensor) * 0.08)
    model.save_pretrained(directory)
    return model


class Paged:
    """Sequences over one cache whose pages lie in random order, driven step by step."""

    def __init__(
        self,
        model: CausalLM,
        sequences: int,
        *,
        page_size: int = 4,
        longest: int = 128,
        seed: int = 0,
        order: str = "scattered",
        shard: Shard = WHOLE,
    ) -> None:
        self.model = model
        self.page_size = page_size
        width = -(-longest // page_size)
        dtype = next(model.parameters()).dtype
        self.kv = KVCache.allocate(
            model.spec, sequences * width, page_size, dtype, torch.device("cpu"), shard=shard
        )
        generator = torch.Generator().manual_seed(seed)
        pages = torch.arange(sequences * width).int().view(sequences, width)
        if order == "scattered":
            pages = pages.flatten()[torch.randperm(pages.numel(), generator=generator)].view(sequences, width)
        elif order == "two pieces":
            pages = pages.roll(width // 2, dims=1)
        self.tables = pages
        self.lengths = [0] * sequences

    def step(self, rows: Sequence[tuple[int, Sequence[int]]], *, logits: bool = True) -> Tensor:
        """Run new tokens of some sequences together; logits [all new tokens, vocab], or [0, vocab]."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, new in rows:
            places = range(self.lengths[sequence], self.lengths[sequence] + len(new))
            tokens += new
            positions += places
            slots += [
                int(self.tables[sequence, p // self.page_size]) * self.page_size + p % self.page_size
                for p in places
            ]
            self.lengths[sequence] += len(new)
        lengths = [self.lengths[sequence] for sequence, _ in rows]
        width = -(-max(lengths) // self.page_size)
        tables = self.tables[[sequence for sequence, _ in rows], :width].clone()
        for row, length in enumerate(lengths):
            tables[row, -(-length // self.page_size) :] = 0
        batch = ForwardBatch(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_lens=[len(new) for _, new in rows],
            kv_lens=lengths,
            block_tables=tables,
            logits_rows=torch.arange(len(tokens) if logits else 0),
        )
        with torch.inference_mode():
            found: Tensor = self.model(batch, self.kv)
        return found
