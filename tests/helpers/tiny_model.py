"""A tiny random Llama in Hugging Face layout: real files and a real tokenizer, loaded in milliseconds.

The same arguments always write the same bytes, so figures taken from one run hold in the next.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# "Ġ" is how byte-level vocabularies write a space. Order is rank: an earlier pair is merged first.
MERGES = (
    ("h", "e"), ("Ġ", "t"), ("i", "n"), ("Ġ", "a"), ("r", "e"), ("o", "n"), ("e", "r"), ("a", "t"),
    ("Ġt", "he"), ("o", "r"), ("e", "n"), ("Ġ", "s"), ("i", "s"), ("a", "n"), ("Ġ", "w"), ("o", "u"),
    ("e", "s"), ("in", "g"), ("Ġ", "c"), ("a", "l"), ("l", "l"), ("Ġa", "n"), ("Ġan", "d"), ("Ġ", "o"),
    ("Ġ", "f"), ("i", "t"), ("Ġ", "p"), ("e", "d"), ("Ġ", "b"), ("Ġo", "f"), ("Ġ", "in"), ("Ġt", "o"),
    ("Ã", "©"), ("ð", "Ł"), ("l", "o"), ("he", "llo"), ("he", "ll"), ("hell", "o"),
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def _byte_alphabet() -> list[str]:
    """The 256 characters that stand for the bytes, in the order of the bytes (GPT-2's printable mapping)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE: ids 0..2 are the special tokens, 3..258 the bytes, then the merges."""
    pieces = [*SPECIALS, *_byte_alphabet()]
    merges: list[tuple[str, str]] = []
    for left, right in MERGES:
        if left in pieces and right in pieces and left + right not in pieces:
            pieces.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIALS])
    return tokenizer


def _weights(
    rng: np.random.Generator, config: dict[str, Any], *, qkv_bias: bool, qk_norm: bool
) -> dict[str, np.ndarray]:
    """Tensors by their Hugging Face names, float32; matrices are [out, in] with variance 1 / in."""
    hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        drawn = rng.standard_normal((rows, columns)) * (scale / columns**0.5)
        return np.asarray(drawn, dtype=np.float32)

    def norm(size: int) -> np.ndarray:
        return np.asarray(1 + 0.1 * rng.standard_normal(size), dtype=np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 4.0)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = norm(hidden)
        tensors[f"{at}.post_attention_layernorm.weight"] = norm(hidden)
        for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            tensors[f"{at}.self_attn.{name}.weight"] = matrix(rows, hidden, 2.0)
            if qkv_bias:
                tensors[f"{at}.self_attn.{name}.bias"] = matrix(1, rows)[0]
        if qk_norm:
            tensors[f"{at}.self_attn.q_norm.weight"] = norm(dim)
            tensors[f"{at}.self_attn.k_norm.weight"] = norm(dim)
        tensors[f"{at}.self_attn.o_proj.weight"] = matrix(hidden, query, 4.0)
        tensors[f"{at}.mlp.gate_proj.weight"] = matrix(ffn, hidden, 2.0)
        tensors[f"{at}.mlp.up_proj.weight"] = matrix(ffn, hidden, 2.0)
        tensors[f"{at}.mlp.down_proj.weight"] = matrix(hidden, ffn, 4.0)
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden, 2.0)
    return tensors


def write_tiny_model(
    directory: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 128,
    max_position: int = 512,
    tied: bool = True,
    generation: dict[str, Any] | None = None,
) -> Path:
    """Write config.json, model.safetensors, tokenizer files and generation_config.json; return `directory`.

    family is a key of ARCHITECTURES. The vocabulary has about 300 entries. `generation` adds to what
    generation_config.json holds (by default only the special ids, so that requests keep OpenAI's defaults).
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "max_position_embeddings": max_position,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": SPECIALS.index("<|im_start|>"),
        "eos_token_id": SPECIALS.index("<|im_end|>"),
        "dtype": "float32",
    }
    if family == "mistral":
        config["sliding_window"] = None
    if family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False
    weights = _weights(
        np.random.default_rng(seed), config, qkv_bias=family == "qwen2", qk_norm=family == "qwen3"
    )
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "generation_config.json": ids | (generation or {}),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_position,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return directory
