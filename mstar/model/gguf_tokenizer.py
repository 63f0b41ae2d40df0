"""A GGUF file's vocabulary as tokenizer.json.

Byte-level BPE only (`tokenizer.ggml.model` = gpt2): the file names its pre-tokenizer, and the split
patterns below are those published with the models of that name.
"""

from __future__ import annotations

from typing import Any

from mstar.model.errors import BadModelFiles, UnsupportedModel
from mstar.model.gguf import GGUF

__all__ = ["tokenizer_config", "tokenizer_json"]

_CONTROL, _USER_DEFINED = 3, 4

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> dict[str, Any]:
    pattern = {
        "type": "Split",
        "pattern": {"Regex": _SPLIT % digits},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [pattern, {**_BYTE_LEVEL, "use_regex": False}]}


_DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "default": _BYTE_LEVEL,
    "gpt-2": _BYTE_LEVEL,
    "smollm": _DIGITS,
    "qwen2": _split(""),
    "llama-bpe": _split("{1,3}"),
}


def tokenizer_json(file: GGUF) -> dict[str, Any]:
    """The content of tokenizer.json; UnsupportedModel for vocabularies that are not byte-level BPE."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModel(
            f"{file.path.name} has a {model!r} vocabulary; only byte-level BPE ('gpt2') converts from GGUF. "
            "Use the model's directory in Hugging Face layout instead."
        )
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{file.path.name} names the pre-tokenizer {pre!r}; "
            f"known are {', '.join(sorted(_PRE_TOKENIZERS))}."
        )
    tokens = file.strings("tokenizer.ggml.tokens")
    merges = file.strings("tokenizer.ggml.merges")
    kinds = _kinds(file, len(tokens))
    added = [
        {
            "id": token,
            "content": tokens[token],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for token, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": _post_processor(file, tokens),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": merges,
        },
    }


def tokenizer_config(file: GGUF) -> dict[str, Any]:
    """The content of tokenizer_config.json, without the chat template."""
    tokens = file.strings("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(_adds_bos(file)),
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        if (token := special(file, key, len(tokens))) is not None:
            config[f"{name}_token"] = tokens[token]
    return config


def special(file: GGUF, key: str, count: int) -> int | None:
    """The id of a special token, or None; BadModelFiles where it lies outside the vocabulary of `count`."""
    name = f"tokenizer.ggml.{key}_token_id"
    if name not in file.metadata:
        return None
    token = file.integer(name)
    if not 0 <= token < count:
        raise BadModelFiles(f"{file.path.name}: {name} is {token}; the vocabulary has {count} tokens.")
    return token


def _kinds(file: GGUF, count: int) -> list[int]:
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        return [0] * count
    listed = list(map(int, kinds)) if not isinstance(kinds, int | float | str) else []
    if len(listed) != count:
        raise BadModelFiles(f"{file.path.name} types {len(listed)} tokens of {count}.")
    return listed


def _adds_bos(file: GGUF) -> bool:
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)) and (
        "tokenizer.ggml.bos_token_id" in file.metadata
    )


def _post_processor(file: GGUF, tokens: list[str]) -> dict[str, Any]:
    byte_level = {**_BYTE_LEVEL, "trim_offsets": False}
    bos = special(file, "bos", len(tokens))
    if not _adds_bos(file) or bos is None:
        return byte_level
    token = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    a, b = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    template = {
        "type": "TemplateProcessing",
        "single": [token, a],
        "pair": [token, a, {"SpecialToken": {"id": tokens[bos], "type_id": 1}}, b],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }
    return {"type": "Sequence", "processors": [byte_level, template]}
