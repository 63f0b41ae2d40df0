"""What config.json and generation_config.json say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mstar.model.errors import BadModelFiles, UnsupportedModel
from mstar.model.spec import GenerationDefaults, RopeScaling, read_generation_defaults, read_spec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def write(directory: Path, drop: str | None = None, **changes: Any) -> Path:
    config = {**CONFIG, **changes}
    config.pop(drop, None) if drop else None
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def generation(directory: Path, **values: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_a_llama_config_is_read(directory: Path) -> None:
    spec = read_spec(directory)
    assert (spec.family, spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == ("llama", 2, 4, 2, 16)
    assert (spec.rope_theta, spec.rope_scaling, spec.tied, spec.max_position) == (5e5, None, True, 512)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (False,) * 4


def test_families_differ_in_biases_and_norms(directory: Path) -> None:
    qwen2, qwen3 = read_spec(write(directory, **QWEN2)), read_spec(write(directory, **QWEN3, head_dim=32))
    assert (qwen2.family, qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == ("qwen2", True, False, False)
    assert (qwen3.family, qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == ("qwen3", False, True, 32)
    assert read_spec(write(directory, **MISTRAL)).family == "mistral"
    biased = read_spec(write(directory, attention_bias=True, mlp_bias=True))
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


def test_the_model_type_stands_in_for_missing_architectures(directory: Path) -> None:
    assert read_spec(write(directory, **{**QWEN2, "architectures": None})).family == "qwen2"


def test_old_and_new_rope_keys_say_the_same(directory: Path) -> None:
    old = read_spec(write(directory, rope_theta=1e6, rope_scaling=None))
    new = read_spec(
        write(directory, drop="rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    )
    assert old == new
    assert old.rope_theta == 1e6


def test_llama3_scaling_is_read_from_both_forms(directory: Path) -> None:
    values = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = read_spec(write(directory, rope_scaling={"rope_type": "llama3", **values}))
    new = read_spec(write(directory, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **values}))
    assert old == new
    assert old.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("config", "generated", "expected"),
    [(2, None, (2,)), ([2, 5], None, (2, 5)), (2, 7, (7, 2)), ([2, 5], [7, 2], (7, 2, 5)), (None, None, ())],
)
def test_end_tokens_of_both_files_are_united(
    directory: Path, config: Any, generated: Any, expected: tuple[int, ...]
) -> None:
    write(directory, eos_token_id=config)
    generation(directory, eos_token_id=generated)
    assert read_spec(directory).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"architectures \['MambaForCausalLM'\].*LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "model_type 'mamba'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_scaling\.rope_type 'yarn'.*llama3"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
            r"rope_parameters\.rope_type 'dynamic'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "every layer must share one"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({**MISTRAL, "sliding_window": 256}, r"sliding_window 256.*null or cover.*512"),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 128}, "sliding_window 128"),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 128}, "sliding_window 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types 'sliding_attention'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config 'awq'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_value(
    directory: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_spec(write(directory, **changes))


def test_a_mistral_without_the_key_has_the_window_of_its_default(directory: Path) -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window 4096"):
        read_spec(write(directory, drop="sliding_window", **MISTRAL, max_position_embeddings=32768))


def test_a_window_as_long_as_the_context_or_switched_off_is_no_window(directory: Path) -> None:
    assert read_spec(write(directory, **{**MISTRAL, "sliding_window": 4096})).family == "mistral"
    assert read_spec(write(directory, **QWEN2, use_sliding_window=False, sliding_window=64)).family == "qwen2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "vocab_size is None"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3.*divisor of num_attention_heads \(4\)"),
        ({"head_dim": 15}, "head_dim is 15.*even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rope_theta": -1.0}, r"rope_theta is -1\.0"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "complete for rope_type llama3"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"bos_token_id": -3}, "bos_token_id is -3"),
    ],
)
def test_a_wrong_value_is_named(directory: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadModelFiles, match=message):
        read_spec(write(directory, **changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_an_unreadable_config_is_refused(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(BadModelFiles, match=r"config\.json"):
        read_spec(directory)


def test_generation_defaults_hold_only_what_the_file_sets(directory: Path) -> None:
    assert read_generation_defaults(directory) == GenerationDefaults()
    generation(directory, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, do_sample=True)
    expected = GenerationDefaults(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
    assert read_generation_defaults(directory) == expected


def test_a_top_k_of_zero_means_all_tokens(directory: Path) -> None:
    assert read_generation_defaults(generation(directory, top_k=0)).top_k == -1
    assert read_generation_defaults(generation(directory, top_k=-1)).top_k == -1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 3.0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("top_k", -5),
        ("temperature", "hot"),
        ("repetition_penalty", 1e-320),
        ("repetition_penalty", 11.0),
    ],
)
def test_a_default_that_no_request_could_ask_for_is_refused(directory: Path, key: str, value: Any) -> None:
    with pytest.raises(BadModelFiles, match=f"{key} is"):
        read_generation_defaults(generation(directory, **{key: value}))
