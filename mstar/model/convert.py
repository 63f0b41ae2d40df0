"""A GGUF file turned once into a directory in Hugging Face layout.

Quantised tensors are dequantised to float32 and kept so: a Q4_1 value is scale * nibble + minimum of two
float16, which float16 rounds in 42 % and bfloat16 in 79 % of SmolLM2's weights, while
float32 equals the transformers loader bit by bit. Tensors stored as float16 stay float16. Shards of 1 GiB
bound the memory needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mstar.model.cache import Progress
from mstar.model.errors import BadModelFiles, UnsupportedModel
from mstar.model.gguf import GGUF
from mstar.model.gguf_tokenizer import special, tokenizer_config, tokenizer_json

__all__ = ["convert_gguf"]

_SHARD_BYTES = 1 << 30

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and safetensors into the directory
    `target`.

    Raises BadModelFiles or UnsupportedModel naming what was met; `target` may then hold part of the files.
    """
    file = GGUF(source)
    config = _config(file)
    _write(target / "config.json", config)
    generation: dict[str, Any] = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    _write(target / "generation_config.json", generation)
    _write(target / "tokenizer.json", tokenizer_json(file))
    _write(target / "tokenizer_config.json", tokenizer_config(file))
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_tensors(file, config, target, progress)


def _config(file: GGUF) -> dict[str, Any]:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _MODEL_TYPES:
        raise UnsupportedModel(
            f"{file.path.name} has the architecture {architecture!r}; "
            f"GGUF files of {', '.join(sorted(_MODEL_TYPES))} can be converted."
        )
    key = f"{architecture}.%s".__mod__
    scaling = file.metadata.get(key("rope.scaling.type"), "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise UnsupportedModel(
            f"{file.path.name} scales its rotary embedding ({scaling!r}); "
            "only GGUF files without that can be converted."
        )
    heads, hidden = file.integer(key("attention.head_count")), file.integer(key("embedding_length"))
    head_dim = file.integer(
        key("attention.key_length"), file.integer(key("rope.dimension_count"), hidden // heads)
    )
    vocab = file.integer(key("vocab_size"), len(file.strings("tokenizer.ggml.tokens")))
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": file.integer(key("feed_forward_length")),
        "num_hidden_layers": file.integer(key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(key("attention.head_count_kv"), heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.integer(key("context_length")),
        "rms_norm_eps": _short(file.real(key("attention.layer_norm_rms_epsilon"))),
        "rope_theta": file.real(key("rope.freq_base"), 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": "float32",
    }
    for name, token in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if (value := special(file, name, vocab)) is not None:
            config[f"{token}_token_id"] = value
    return config


def _short(value: float) -> float:
    # The file holds float32: 1e-5 reads as 9.999999747378752e-06 in double precision.
    return float(str(np.float32(value)))


def _target_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        block, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if block == "blk" and layer.isdecimal() and part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{kind}"
    raise UnsupportedModel(
        f"The GGUF tensor {name} belongs to no layer known here; the file cannot be converted."
    )


def _unpermute(weight: npt.NDArray[np.floating], heads: int) -> npt.NDArray[np.floating]:
    """Undo the reordering of rotary rows that GGUF files of architecture llama carry.

    [heads * d, ...] with each head's rows interleaved (2i, 2i + 1 rotate together) -> halves (i, i + d/2).
    """
    rows = weight.shape[0]
    if rows % (2 * heads):
        raise BadModelFiles(f"A query or key tensor has {rows} rows, which {heads} heads do not divide.")
    split = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def _write_tensors(file: GGUF, config: dict[str, Any], target: Path, progress: Progress) -> None:
    from safetensors.numpy import save_file

    shards: list[list[str]] = [[]]
    room = _SHARD_BYTES
    for name, tensor in file.tensors.items():
        if (room := room - file.nbytes(tensor)) < 0 and shards[-1]:
            shards.append([])
            room = _SHARD_BYTES - file.nbytes(tensor)
        shards[-1].append(name)
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if config["model_type"] != "llama":
        permuted = {}
    done, total = 0, sum(map(file.nbytes, file.tensors.values()))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        filename = (
            "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        dense: dict[str, npt.NDArray[np.floating]] = {}
        for name in names:
            weight = file.dense(name)
            if heads := permuted.get(name.split(".")[-2]):
                weight = _unpermute(weight, heads)
            dense[_target_name(name)] = weight
            done += file.nbytes(file.tensors[name])
            progress("converting", done, total)
        save_file(dense, target / filename, metadata={"format": "pt"})
        index.update(dict.fromkeys(dense, filename))
    if len(shards) > 1:
        _write(
            target / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
        )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
