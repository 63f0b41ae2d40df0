"""GGUF files made from a directory in Hugging Face layout, and a wheel around one."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from mstar.model.registry import PackagedModel

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PLAIN = gguf.GGMLQuantizationType.F32


def write_gguf(
    source: Path,
    target: Path,
    *,
    kind: gguf.GGMLQuantizationType = _PLAIN,
    pre: str = "default",
    add_bos: bool = False,
) -> Path:
    """The model in `source` as a GGUF file, matrices as `kind`; llama's rows reordered as the format has
    them."""
    config = json.loads((source / "config.json").read_text())
    layout = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(target, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    special = {token["content"] for token in layout["added_tokens"]}
    vocab = {**layout["model"]["vocab"], **{t["content"]: t["id"] for t in layout["added_tokens"]}}
    tokens = sorted(vocab, key=lambda text: vocab[text])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = [m if isinstance(m, str) else " ".join(m) for m in layout["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(add_bos)
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])
    for name, weight in load_file(source / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        short = _TOP.get(stem) or f"blk.{layer}.{_LAYER[part]}"
        if arch == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
            weight = _interleave(weight, heads)
        packed = kind if weight.ndim == 2 else _PLAIN
        data = gguf.quants.quantize(weight, packed)
        writer.add_tensor(f"{short}.{suffix}", data, raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    rows = weight.shape[0] // heads
    split = weight.reshape(heads, 2, rows // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def write_wheel(gguf_file: Path, directory: Path) -> PackagedModel:
    """A wheel `tinypack` in `directory` with the file inside, and the registry entry that asks for it."""
    import hashlib

    member, info = f"tinypack/{gguf_file.name}", "tinypack-0.1.dist-info"
    wheel = directory / "tinypack-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, member)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinypack\nVersion: 0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    return PackagedModel("tinypack==0.1", member, wheel.stat().st_size, digest, "Apache-2.0")
