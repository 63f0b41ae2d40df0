"""What a model is, read from config.json and generation_config.json; no tensors, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mstar.model.errors import BadModelFiles, UnsupportedModel

__all__ = [
    "ARCHITECTURES",
    "GenerationDefaults",
    "ModelSpec",
    "RopeScaling",
    "read_generation_defaults",
    "read_json",
    "read_spec",
]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures as config.json names them, and the family that builds each."""

_MISTRAL_DEFAULT_WINDOW = 4096


class RopeScaling(msgspec.Struct, frozen=True):
    """Llama 3's frequency-dependent scaling of the rotary embedding (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer's shape.

    `heads` query heads share `kv_heads` key/value heads of `head_dim`; `ffn_size` is the gated MLP's width;
    `max_position` the window in tokens. `tied`: the output projection is the embedding matrix.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    max_position: int
    rope_theta: float
    rms_eps: float
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults that the model's generation_config.json sets; None where it says nothing.

    `top_k` -1 means all tokens (the file's 0).
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_spec(directory: Path) -> ModelSpec:
    """The spec of the model in `directory`.

    Raises BadModelFiles where config.json is missing, unreadable or lacks a value, UnsupportedModel for an
    unknown architecture, a quantised checkpoint, an active sliding window, a rope scaling or an activation
    that is not implemented; each names the key and the value.
    """
    config = _Config(directory / "config.json")
    family = _family(config)
    _refuse(config, family)
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", heads)
    head_dim = config.positive("head_dim", hidden // heads)
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if head_dim % 2:
        raise config.bad("head_dim", "an even number: rotary embeddings turn pairs")
    theta, scaling = _rope(config)
    bias = config.flag("attention_bias", False) if family in ("llama", "qwen3") else False
    return ModelSpec(
        family=family,
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden,
        layers=config.positive("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=config.positive("intermediate_size"),
        max_position=config.positive("max_position_embeddings"),
        rope_theta=theta,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        tied=config.flag("tie_word_embeddings", False),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False) if family == "llama" else False,
        qk_norm=family == "qwen3",
        rope_scaling=scaling,
        eos_token_ids=_eos(directory, config),
        bos_token_id=config.token("bos_token_id"),
    )


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """The sampling defaults of `directory`; all None without a generation_config.json.

    Raises BadModelFiles naming a value that no request could ask for.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    config = _Config(path)
    top_k = config.optional("top_k")
    return GenerationDefaults(
        temperature=config.between("temperature", 0.0, 2.0),
        top_p=config.between("top_p", 0.0, 1.0, open_low=True),
        top_k=None if top_k is None else (config.integer("top_k", least=0) or -1) if top_k != -1 else -1,
        min_p=config.between("min_p", 0.0, 1.0),
        repetition_penalty=config.between("repetition_penalty", 0.01, 10.0),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file `path`; BadModelFiles where it is missing or not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModelFiles(f"{path} is missing.") from None
    except (OSError, ValueError) as error:
        raise BadModelFiles(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise BadModelFiles(f"{path} holds a {type(content).__name__}; a JSON object is needed.")
    return content


class _Config:
    """config.json's values with types checked, errors naming file, key and value."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = read_json(path)

    def bad(self, key: str, wanted: str) -> BadModelFiles:
        return BadModelFiles(f"{self._path}: {key} is {self._values.get(key)!r}; it must be {wanted}.")

    def unsupported(self, key: str, value: object, allowed: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._path}: {key} {value!r} is not supported; {allowed}.")

    def optional(self, key: str) -> Any:
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, least: int = 0) -> int:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.bad(key, f"an integer of at least {least}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        return self.integer(key, default, least=1)

    def number(self, key: str, default: float) -> float:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.bad(key, "a number above 0")
        return float(value)

    def between(self, key: str, low: float, high: float, *, open_low: bool = False) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not low <= value <= high or (open_low and value == low):
            raise self.bad(
                key, f"a number {'above' if open_low else 'from'} {low} {'up ' if open_low else ''}to {high}"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def token(self, key: str) -> int | None:
        return None if self._values.get(key) is None else self.integer(key)

    def tokens(self, key: str) -> tuple[int, ...]:
        value = self._values.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
            raise self.bad(key, "a token id or a list of them")
        return tuple(listed)


def _family(config: _Config) -> str:
    known = ", ".join(ARCHITECTURES)
    listed = config.optional("architectures")
    if isinstance(listed, list) and listed:
        if len(listed) == 1 and listed[0] in ARCHITECTURES:
            return ARCHITECTURES[listed[0]]
        raise config.unsupported("architectures", listed, f"known architectures are {known}")
    kind = config.optional("model_type")
    if kind not in ARCHITECTURES.values():
        raise config.unsupported("model_type", kind, f"known architectures are {known}")
    return str(kind)


def _refuse(config: _Config, family: str) -> None:
    if (quantised := config.optional("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise config.unsupported(
            "quantization_config", method, "use an unquantised checkpoint or a GGUF file"
        )
    activation = config.optional("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise config.unsupported("hidden_act", activation, "gated MLPs here use silu")
    window, longest = _window(config, family), config.positive("max_position_embeddings")
    if window is not None and window < longest:
        allowed = f"a window must be null or cover max_position_embeddings ({longest})"
        raise config.unsupported("sliding_window", window, allowed)
    kinds = config.optional("layer_types")
    if isinstance(kinds, list) and window is None:
        other = sorted({str(kind) for kind in kinds} - {"full_attention"})
        if other:
            raise config.unsupported("layer_types", other[0], "every layer must be full_attention")


def _window(config: _Config, family: str) -> int | None:
    if family == "llama":
        return None
    if family in ("qwen2", "qwen3") and not config.flag("use_sliding_window", False):
        return None
    if config.optional("sliding_window") is None and "sliding_window" in config._values:
        return None
    return config.positive("sliding_window", _MISTRAL_DEFAULT_WINDOW)


def _rope(config: _Config) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling`
    (before)."""
    key = "rope_parameters" if config.optional("rope_parameters") else "rope_scaling"
    given = config.optional(key) or {}
    if not isinstance(given, Mapping):
        raise config.bad(key, "an object or null")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise config.unsupported(key, dict(given), "every layer must share one rotary embedding")
    theta = given.get("rope_theta")
    if theta is None:
        theta = config.number("rope_theta", 10000.0)
    partial = given.get("partial_rotary_factor", config.optional("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise config.unsupported("partial_rotary_factor", partial, "the whole head must be rotated (1.0)")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise config.bad(key, "an object whose rope_theta is a number above 0")
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise config.unsupported(f"{key}.rope_type", kind, "known are 'default' and 'llama3'")
    try:
        scaling = msgspec.convert(
            {
                "factor": given["factor"],
                "low_freq_factor": given["low_freq_factor"],
                "high_freq_factor": given["high_freq_factor"],
                "original_max_position": given["original_max_position_embeddings"],
            },
            RopeScaling,
        )
    except (KeyError, msgspec.ValidationError) as error:
        raise config.bad(key, f"complete for rope_type llama3 ({error})") from error
    if scaling.factor <= 0 or scaling.high_freq_factor <= scaling.low_freq_factor:
        raise config.bad(key, "with a factor above 0 and high_freq_factor above low_freq_factor")
    return float(theta), scaling


def _eos(directory: Path, config: _Config) -> tuple[int, ...]:
    listed: list[int] = []
    if (path := directory / "generation_config.json").exists():
        listed += _Config(path).tokens("eos_token_id")
    listed += config.tokens("eos_token_id")
    return tuple(dict.fromkeys(listed))
