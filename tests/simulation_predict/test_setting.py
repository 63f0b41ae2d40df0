"""Deployments: the simulator's limits are those of the engine, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mstar.config.load import ConfigError, resolve
from mstar.config.schema import RankConfig
from mstar.messages.step import Bind
from mstar.model.graphs import DEFAULT_MAX_BATCH_TOKENS
from mstar.simulation.cost import ModelFacts
from mstar.simulation.setting import check_fits, setting_of
from mstar.simulation.workloads import Job
from mstar.worker.engine import build_engine
from tests.helpers.tiny_model import write_tiny_model

FACTS = ModelFacts("toy", window=4096, kv_token_bytes=1024, batch_tokens=512)


def no_input(bind: Bind) -> NDArray[np.int32]:
    raise NotImplementedError


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"max_batch_tokens": "off"},
        {"max_batch_tokens": 128, "min_chunk_tokens": 16, "pipeline_depth": 2, "target_itl_ms": 40.0},
        {
            "max_batch_tokens": 100,
            "prefix_cache": False,
            "max_seq_len": 64,
            "page_size": 8,
            "max_num_seqs": 100,
        },
    ],
)
def test_the_limits_are_those_that_the_engine_sets(flags: dict[str, Any], tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    found = resolve(None, {}, {"kv_cache_bytes": 1 << 22, "dtype": "float32", "threads": 1} | flags)
    config = RankConfig(0, found.deployment, "tiny", str(directory))
    limits = build_engine(config, no_input, lambda *stage: None).limits
    token_bytes = (1 << 22) // limits.pages // limits.page_size
    facts = ModelFacts("tiny", _window(directory), token_bytes, batch_tokens=DEFAULT_MAX_BATCH_TOKENS)
    assert setting_of(found, facts).limits == limits


def _window(directory: Path) -> int:
    from mstar.model.spec import read_spec

    return read_spec(directory).max_position


def test_a_device_has_its_own_cache_unless_one_is_asked_for() -> None:
    facts = ModelFacts("toy", 4096, 1024, cache_bytes=64 << 20)
    assert setting_of(resolve(None, {}, {}), facts).limits.pages == 4096
    assert setting_of(resolve(None, {}, {"kv_cache_bytes": 16 << 20}), facts).limits.pages == 1024


def test_ranks_share_the_cache_of_a_token() -> None:
    flags = {"kv_cache_bytes": 16 << 20, "tensor_parallel_size": 2}
    setting = setting_of(resolve(None, {}, flags), FACTS)
    assert setting.ranks == 2
    assert setting.limits.pages == 1024  # what is given is the cell's, as in `mstar serve`


def test_what_does_not_fit_is_refused_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match="raise --kv-cache-bytes or lower --max-model-len"):
        setting_of(resolve(None, {}, {"kv_cache_bytes": 1 << 20}), FACTS)
    setting = setting_of(resolve(None, {}, {"max_seq_len": 1000}), FACTS)
    check_fits(setting, "toy", [Job("a", 900, 100)])
    with pytest.raises(ConfigError, match="request of 1001 tokens, the deployment's window holds 1000"):
        check_fits(setting, "toy", [Job("a", 10, 10), Job("a", 901, 100)])


def test_groups_of_nodes_are_placed_as_the_engine_places_them() -> None:
    groups: dict[str, Any] = {"node_groups": [{"tp_size": 3}]}
    assert setting_of(resolve(None, {}, groups, label="argument"), FACTS).ranks == 3
    groups = {"node_groups": [{"node_names": ["llmm"]}]}
    with pytest.raises(ConfigError, match="'llmm', which is no node of the model"):
        setting_of(resolve(None, {}, groups, label="argument"), FACTS)


def test_a_budget_of_a_node_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_batch_tokens"):
        setting_of(resolve(None, {}, {"max_batch_tokens": {"llm": {"nothing": 3}}}), FACTS)
