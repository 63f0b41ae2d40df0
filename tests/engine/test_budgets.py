"""What a deployment says of budgets, over what a model's graph declares."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mstar.config.load import ConfigError, resolve
from mstar.config.schema import Deployment
from mstar.engine.budgets import chunking_of
from mstar.engine.chunking import DEFAULT_MIN_CHUNK_TOKENS, ChunkingManagement
from mstar.graph.model import ModelGraph
from mstar.graph.policy import ChunkingPolicy
from mstar.graph.rewrite import with_chunk_loops
from mstar.model.graphs import COMBINED, DECODE, LLM, PREFILL, language_model
from mstar.validation.placement import NodeFacts, place

ROOT = Path(__file__).parents[2]


class Code:
    def chunkable(self, graph_walk: str) -> bool:
        return True


def model(budget: int = 512, *, override_mixed: bool = False) -> ModelGraph:
    """A language model, on whose node a walk's own budget counts in mixed steps or does not."""
    policy = ChunkingPolicy(budget, chunkable=True, can_override_mixed_max_tokens=override_mixed)
    graph = language_model()
    return replace(graph, chunking_policies=dict.fromkeys(graph.chunking_policies, policy))


def made(graph: ModelGraph | None = None, **settings: Any) -> ChunkingManagement:
    return chunking_of(Deployment(**settings), graph or model(), {LLM: Code()})


def refused(graph: ModelGraph | None = None, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        made(graph, **settings)
    return str(caught.value)


@pytest.mark.behaviour("S4-09")
def test_graph_policies_and_budgets_are_known_before_anything_is_loaded() -> None:
    graph = language_model()
    found = chunking_of(Deployment(max_batch_tokens=256), graph, {})
    assert with_chunk_loops(graph).walks[PREFILL] != graph.walks[PREFILL]
    assert found.policy(LLM, PREFILL) is graph.policy(LLM, PREFILL)
    assert found.max_batch_tokens(LLM, COMBINED) == 256


def test_a_language_model_has_its_declared_budget_where_the_deployment_says_nothing() -> None:
    found = made()
    assert [found.max_batch_tokens(LLM, walk) for walk in (PREFILL, COMBINED, DECODE)] == [512, 512, None]
    assert [found.chunkable(LLM, walk) for walk in (PREFILL, COMBINED, DECODE)] == [True, True, False]


@pytest.mark.behaviour("S4-12")
@pytest.mark.parametrize("budget", [128, {LLM: 128}])
def test_a_number_is_for_prefill_and_for_mixed_steps(budget: Any) -> None:
    found = made(max_batch_tokens=budget)
    assert [found.max_batch_tokens(LLM, walk) for walk in (PREFILL, COMBINED)] == [128, 128]


@pytest.mark.behaviour("S4-14")
@pytest.mark.parametrize("budget", ["off", {LLM: None}])
def test_off_leaves_no_budget_and_nothing_to_chunk(budget: Any) -> None:
    found = made(max_batch_tokens=budget)
    for walk in (PREFILL, COMBINED):
        assert (found.chunkable(LLM, walk), found.max_batch_tokens(LLM, walk)) == (False, None)


@pytest.mark.behaviour("S4-18")
@pytest.mark.behaviour("S4-19")
def test_in_mixed_steps_the_combined_walk_is_named_and_not_its_parts() -> None:
    message = refused(max_batch_tokens={LLM: {PREFILL: 128}})
    assert message.endswith("set max_batch_tokens.llm.prefill_decode instead")
    assert made(max_batch_tokens={LLM: {COMBINED: 128}}).max_batch_tokens(LLM, COMBINED) == 128


@pytest.mark.behaviour("S4-20")
@pytest.mark.behaviour("S4-21")
def test_a_model_may_let_a_walk_be_capped_within_mixed_steps() -> None:
    found = made(model(override_mixed=True), max_batch_tokens={LLM: {PREFILL: 100}})
    assert found.walk_caps(LLM, COMBINED) == {PREFILL: 100}
    assert found.max_batch_tokens(LLM, COMBINED) == 512


@pytest.mark.behaviour("S4-15")
@pytest.mark.behaviour("S4-16")
def test_what_the_model_does_not_have_or_budget_is_refused_by_name() -> None:
    assert "no node 'lm'; allowed are llm" in refused(max_batch_tokens={"lm": 128})
    assert "no walk 'prefil' runs that node" in refused(max_batch_tokens={LLM: {"prefil": 128}})
    assert "the model does not budget that walk" in refused(max_batch_tokens={LLM: {DECODE: 128}})


def test_a_mixed_step_has_a_token_for_every_sequence() -> None:
    for small in ({LLM: 63}, {LLM: {COMBINED: 63}}):
        assert "63, less than max_num_seqs, which is 64" in refused(max_batch_tokens=small)
    capped = made(model(override_mixed=True), max_batch_tokens={LLM: {PREFILL: 8}})
    assert capped.walk_caps(LLM, COMBINED) == {PREFILL: 8}


@pytest.mark.behaviour("S4-28")
def test_the_floor_is_the_deployments_or_the_default() -> None:
    assert made().min_chunk_tokens(512) == DEFAULT_MIN_CHUNK_TOKENS
    assert made(min_chunk_tokens=16).min_chunk_tokens(512) == 16


@pytest.mark.behaviour("S0-03")
def test_nodes_that_are_placed_with_sequence_parallelism_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mstar.engine.chunking"):
        found = chunking_of(Deployment(max_batch_tokens=128), model(), {LLM: Code()}, {LLM: "so it is"})
    assert not found.chunkable(LLM, PREFILL)
    assert [record.getMessage() for record in caplog.records] == [
        "node llm is not chunked and runs every prompt in one step: so it is"
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_deployments_of_the_repository_fit_a_language_model(path: Path) -> None:
    deployment = resolve(path, {}, {}).deployment
    nodes = {LLM: NodeFacts(language_model().walks_of(LLM))}
    placement = place(deployment.node_groups, nodes, tensor_parallel_size=deployment.tensor_parallel_size)
    found = chunking_of(deployment, language_model(), {LLM: Code()}, placement.no_chunking)
    assert found.chunkable(LLM, COMBINED)
