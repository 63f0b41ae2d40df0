"""Where settings come from, which one wins, and what a wrong one is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from mstar.cli.settings import add_settings, resolved
from mstar.config.describe import allowed, describe, field_types, leaves, reference
from mstar.config.load import ConfigError, resolve
from mstar.config.options import OPTIONS
from mstar.config.schema import Deployment, Listen, NodeGroup

ROOT = Path(__file__).parents[2]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    return path


def refused(file: Path | None = None, env: dict[str, str] | None = None, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(file, env or {}, flags)
    return str(caught.value)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "max_num_seqs: 1\npage_size: 1\nthreads: 1\nlisten:\n  port: 1\n")
    env = {"MSTAR_BLOCK_SIZE": "2", "MSTAR_THREADS": "2"}
    found = resolve(file, env, {"threads": "3"})
    assert found.deployment == Deployment(max_num_seqs=1, page_size=2, threads=3, listen=Listen(port=1))
    assert found.sources["max_num_seqs"] == f"file {file}"
    assert found.sources["page_size"] == "environment MSTAR_BLOCK_SIZE"
    assert found.sources["threads"] == "flag --threads"
    assert found.sources["dtype"] == "default"


def test_every_field_of_the_schema_has_one_option_and_one_variable() -> None:
    assert sorted(entry.path for entry in OPTIONS) == sorted(field_types())
    given = [entry for entry in OPTIONS if entry.flags]
    assert len({entry.variable for entry in given}) == len(given)
    assert [entry.path for entry in OPTIONS if not entry.flags] == ["node_groups"]


@pytest.mark.parametrize("entry", OPTIONS, ids=lambda entry: entry.path)
def test_every_default_is_accepted_from_the_file_and_from_flags(entry: Any, tmp_path: Path) -> None:
    value = leaves(Deployment())[entry.path]
    if value is None or not entry.flags:
        return
    flag = list(value) if entry.many else value if entry.negated else str(value)
    assert resolve(None, {}, {entry.path: flag}).deployment == Deployment()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"pipeline_depth": "3"},
            "pipeline_depth is '3' (flag --pipeline-depth); allowed is a whole number from 0 to 2",
        ),
        (
            {"listen.port": "70000"},
            "listen.port is '70000' (flag --port); allowed is a whole number from 0 to 65535",
        ),
        (
            {"dtype": "int3"},
            "dtype is 'int3' (flag --dtype); allowed is one of auto, bfloat16, float16, float32",
        ),
        ({"drain_seconds": "nan"}, "drain_seconds is 'nan'"),
        ({"kv_cache_bytes": "1 parsec"}, "kv_cache_bytes is '1 parsec'"),
        ({"kv_cache_bytes": "0"}, "kv_cache_bytes is '0'"),
        ({"threads": 1025}, "threads is 1025 (flag --threads); allowed is a whole number from 1 to 1024"),
        ({"max_concurrent_requests": 10**9}, "allowed is a whole number from 1 to 65536"),
        ({"max_batch_tokens": 10**12}, "allowed is a whole number from 1 to 1048576"),
        ({"tensor_parallel_size": 65}, "allowed is a whole number from 1 to 64"),
        (
            {"max_batch_tokens": 63},
            "(flag --max-num-batched-tokens), less than max_num_seqs, which is 64 (default); every sequence",
        ),
        (
            {"max_batch_tokens": "off", "target_itl_ms": "50"},
            "target_itl_ms is 50 (flag --target-itl-ms), but max_batch_tokens turns chunks off (flag",
        ),
        ({"model": ""}, "model is empty"),
        ({"listen.api_keys": ["clé"]}, "printable ASCII"),
    ],
)
def test_a_value_out_of_range_is_told_with_path_value_source_and_range(
    flags: dict[str, Any], message: str
) -> None:
    assert message in refused(**flags)


def test_a_wrong_key_is_told_with_its_neighbours(tmp_path: Path) -> None:
    file = written(tmp_path, "listen:\n  prot: 1\n")
    message = refused(file)
    assert f"unknown setting listen.prot (file {file})" in message
    assert message.endswith("Did you mean listen.port?")
    assert "allowed are listen.host, listen.port" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seqs: '64'", "max_num_seqs is '64'"),
        ("listen: 3", "listen in"),
        ("- a", "allowed are keys with values"),
        ("a: [", "is not valid YAML"),
        ("? [a, b]\n: 1", "a key is a list or a mapping"),
        ("[" * 5000, "nests too deeply"),
        ("dtype: auto\ndtype: float32", "the key 'dtype' is given twice"),
        ("listen:\n  tcp: 3", "listen.tcp is 3"),
    ],
)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(written(tmp_path, text))


def test_an_empty_file_a_missing_one_and_an_empty_variable(tmp_path: Path) -> None:
    assert resolve(written(tmp_path, ""), {"MSTAR_PORT": ""}, {}).deployment == Deployment()
    assert "cannot be read: No such file" in refused(tmp_path / "none.yaml")


def test_lists_and_switches_come_from_the_environment_too() -> None:
    env = {"MSTAR_API_KEY": "a, b", "MSTAR_NO_TCP": "1", "MSTAR_SERVED_MODEL_NAME": "x"}
    deployment = resolve(None, env, {}).deployment
    assert deployment.listen.api_keys == ("a", "b")
    assert not deployment.listen.tcp
    assert deployment.served_model_name == ("x",)
    assert resolve(None, {"MSTAR_NO_TCP": "false"}, {}).deployment.listen.tcp
    assert "listen.tcp is 'maybe'" in refused(env={"MSTAR_NO_TCP": "maybe"})


def test_mistyped_variables_are_named_and_those_of_a_cluster_are_not() -> None:
    env = {"MSTAR_PROT": "1", "MSTAR_CACHE": "/x", "MSTAR_SERVICE_PORT": "8000", "MSTAR_PORT_80_TCP": "x"}
    assert resolve(None, env, {}).mistyped == (("MSTAR_PROT", "MSTAR_PORT"),)


def test_sizes_take_units_wherever_they_come_from(tmp_path: Path) -> None:
    file = written(tmp_path, "kv_cache_bytes: 2GiB\nmax_body_bytes: 1000\n")
    deployment = resolve(file, {"MSTAR_MAX_BODY_BYTES": "1.5 KB"}, {}).deployment
    assert (deployment.kv_cache_bytes, deployment.max_body_bytes) == (2 << 30, 1500)


def test_keys_are_counted_and_never_shown() -> None:
    found = resolve(None, {}, {"listen.api_keys": ["secret"]})
    assert ("listen.api_keys", "1 hidden", "flag --api-key") in describe(*found[:2])
    assert "secret" not in refused(**{"listen.api_keys": ["secret", 3]})


def test_ranges_are_told_in_words() -> None:
    assert allowed("max_num_seqs") == "a whole number from 1 to 1024"
    assert allowed("stage_timeout") == "a number greater than 0, at most 86400"
    assert allowed("threads") == "a whole number from 1 to 1024 (or unset)"
    assert allowed("max_seq_len") == "a whole number of at least 1 (or unset)"


def test_the_documentation_holds_the_generated_tables() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    assert reference() in text, "run python -m mstar.config.describe --write docs/configuration.md"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_deployments_of_the_repository_resolve(path: Path) -> None:
    assert resolve(path, {}, {}).sources["model"] == f"file {path}"


@pytest.mark.parametrize(
    ("text", "budgets"),
    [
        ("max_batch_tokens: 512", 512),
        ("max_batch_tokens: off", "off"),
        ("max_batch_tokens: 'off'", "off"),
        ("max_batch_tokens:", None),
        ("max_batch_tokens: {llm: 512, vision: null}", {"llm": 512, "vision": None}),
        ("max_batch_tokens: {llm: {prefill: 64, mixed: off}}", {"llm": {"prefill": 64, "mixed": None}}),
    ],
)
def test_budgets_are_for_all_for_nodes_or_for_walks(tmp_path: Path, text: str, budgets: object) -> None:
    assert resolve(written(tmp_path, text), {}, {}).deployment.max_batch_tokens == budgets


@pytest.mark.behaviour("S4-14")
def test_off_turns_budgets_off_wherever_it_is_said() -> None:
    for env, flags in (({}, {"max_batch_tokens": "off"}), ({"MSTAR_MAX_NUM_BATCHED_TOKENS": "Off"}, {})):
        assert resolve(None, env, flags).deployment.max_batch_tokens == "off"
    assert resolve(None, {}, {"max_batch_tokens": "128"}).deployment.max_batch_tokens == 128
    assert "allowed is a whole number from 1 to 1048576 or off" in refused(max_batch_tokens="none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_tokens: {llm: 0}", "max_batch_tokens.llm is 0 (file"),
        (
            "max_batch_tokens: {llm: {prefill: 0}}",
            "allowed is a whole number from 1 to 1048576 (or null)",
        ),
        ("max_batch_tokens: {llm: {prefill: yes}}", "max_batch_tokens.llm.prefill is True"),
        ("max_batch_tokens: {3: 64}", "a key of max_batch_tokens is 3"),
        ("max_batch_tokens: [64]", "max_batch_tokens is [64]"),
        ("node_groups: [{node_nams: [llm]}]", "unknown setting node_groups[0].node_nams (file"),
        ("node_groups: [{node_nams: [llm]}]", "sp_size, graph_walks. Did you mean node_names?"),
        ("node_groups: [{}, {ranks: [0, 64]}]", "node_groups[1].ranks[1] is 64 (file"),
        ("node_groups: [{tp_size: 0}]", "allowed is a whole number from 1 to 64"),
        ("node_groups: {llm: [0]}", "allowed is a list, each a mapping with the keys node_names, ranks"),
        ("target_itl_ms: 0", "target_itl_ms is 0 (file"),
        ("prefix_cache: 3", "prefix_cache is 3"),
        ("min_chunk_tokens: 0", "allowed is a whole number from 1 to 1048576 (or unset)"),
    ],
)
def test_what_is_wrong_inside_a_value_is_told_with_its_own_path(
    tmp_path: Path, text: str, message: str
) -> None:
    assert message in refused(written(tmp_path, text))


def test_node_groups_come_as_they_are_written(tmp_path: Path) -> None:
    text = "node_groups:\n- {node_names: [llm], ranks: [0, 1], tp_size: 2, graph_walks: [prefill]}\n- {}\n"
    found = resolve(written(tmp_path, text), {}, {})
    assert found.deployment.node_groups == (
        NodeGroup(("llm",), (0, 1), tp_size=2, graph_walks=("prefill",)),
        NodeGroup(),
    )
    shown = {path: value for path, value, _ in describe(*found[:2])}
    assert shown["node_groups"] == "llm on ranks 0, 1 tp 2 in prefill; the other nodes"
    assert shown["max_batch_tokens"] == "unset"


def test_budgets_of_walks_are_shown_with_what_is_off(tmp_path: Path) -> None:
    file = written(tmp_path, "max_batch_tokens: {llm: {prefill: 64, mixed: off}, vision: null}")
    shown = {path: value for path, value, _ in describe(*resolve(file, {}, {})[:2])}
    assert shown["max_batch_tokens"] == "llm: {prefill: 64, mixed: off}, vision: off"


def test_the_prefix_cache_is_a_switch_with_two_sides() -> None:
    assert resolve(None, {}, {}).deployment.prefix_cache
    for said in ("0", "no", "off", "False"):
        assert not resolve(None, {"MSTAR_ENABLE_PREFIX_CACHING": said}, {}).deployment.prefix_cache
    env = {"MSTAR_ENABLE_PREFIX_CACHING": "no"}
    assert resolve(None, env, {"prefix_cache": True}).deployment.prefix_cache
    parser = argparse.ArgumentParser()
    add_settings(parser)
    assert not resolved(parser.parse_args(["--no-enable-prefix-caching"])).deployment.prefix_cache
    assert resolved(parser.parse_args(["--enable-prefix-caching"])).deployment.prefix_cache


def test_the_flags_of_a_step_are_read() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    typed = "--max-num-batched-tokens 256 --target-itl-ms 25 --min-chunk-tokens 16 --tp 2"
    deployment = resolved(parser.parse_args(typed.split())).deployment
    assert (deployment.max_batch_tokens, deployment.target_itl_ms) == (256, 25.0)
    assert (deployment.min_chunk_tokens, deployment.tensor_parallel_size) == (16, 2)
    off = resolved(parser.parse_args(["--max-num-batched-tokens", "off"])).deployment
    assert off.max_batch_tokens == "off"


@pytest.mark.behaviour("S0-34")
def test_ranks_in_lockstep_overlap_by_default_and_depth_0_remains() -> None:
    assert resolve(None, {}, {"tensor_parallel_size": "2"}).deployment.pipeline_depth == 1
    both = {"tensor_parallel_size": "2", "pipeline_depth": "0"}
    assert resolve(None, {}, both).deployment.pipeline_depth == 0
