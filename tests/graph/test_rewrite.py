"""Chunkable nodes in their chunk Loops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mstar.graph.errors import GraphError
from mstar.graph.model import ModelGraph
from mstar.graph.nodes import CLIENT, Counts, GraphEdge, GraphNode, Loop, Parallel, Sequential
from mstar.graph.policy import NO_CHUNKING, ChunkingPolicy
from mstar.graph.rewrite import chunk_cap, chunk_loop, with_chunk_loops
from mstar.model.graphs import COMBINED, DECODE, LLM, PREFILL, language_model
from tests.graph.models import any_to_any, one_walk

CHUNKED = ChunkingPolicy(8, True)


def thinker_loop() -> Loop:
    section = with_chunk_loops(any_to_any()).walks["thinker_prefill"]
    assert isinstance(section, Sequential)
    loop = section.sections[1]
    assert isinstance(loop, Loop)
    return loop


@pytest.mark.behaviour("S4-06")
def test_the_chunk_loop_counts_tokens_up_to_the_length_of_the_input() -> None:
    loop = with_chunk_loops(language_model()).walks[PREFILL]
    assert isinstance(loop, Loop)
    assert loop.name == chunk_loop(LLM, PREFILL)
    assert loop.cap == chunk_cap(LLM, PREFILL)
    assert loop.counts is Counts.TOKENS
    assert loop.start == 0


@pytest.mark.behaviour("S0-53")
def test_per_chunk_edges_stay_on_the_body_and_the_others_move_to_the_loop() -> None:
    loop = thinker_loop()
    assert isinstance(loop.body, GraphNode)
    assert [edge.name for edge in loop.body.outputs] == ["states"]
    assert [(edge.name, edge.to) for edge in loop.outputs] == [("token", "@client"), ("token", "@next")]
    assert {edge.source for edge in loop.outputs} == {"thinker"}


@pytest.mark.behaviour("S0-50")
def test_without_per_chunk_outputs_streams_leave_with_the_final_chunk_too() -> None:
    policies = {("thinker", "thinker_prefill"): CHUNKED}
    section = with_chunk_loops(replace(any_to_any(), chunking_policies=policies)).walks["thinker_prefill"]
    assert isinstance(section, Sequential)
    loop = section.sections[1]
    assert isinstance(loop, Loop)
    assert isinstance(loop.body, GraphNode)
    assert loop.body.outputs == ()
    assert [edge.name for edge in loop.outputs] == ["token", "token", "states"]


@pytest.mark.behaviour("S0-42")
def test_one_node_has_chunkable_and_unchunkable_walks() -> None:
    graph = with_chunk_loops(language_model())
    assert isinstance(graph.walks[PREFILL], Loop)
    assert graph.walks[DECODE] == language_model().walks[DECODE]


def test_a_policy_that_chunks_nothing_or_is_of_a_combined_walk_wraps_nothing() -> None:
    policies = {(LLM, PREFILL): NO_CHUNKING, (LLM, COMBINED): CHUNKED}
    graph = replace(language_model(), chunking_policies=policies)
    assert with_chunk_loops(graph) is graph


@pytest.mark.parametrize("graph", [language_model(), any_to_any()], ids=["language_model", "any_to_any"])
def test_what_is_wrapped_is_not_wrapped_again(graph: ModelGraph) -> None:
    once = with_chunk_loops(graph)
    assert with_chunk_loops(once) is once


def test_a_chunked_branch_and_a_chunked_node_in_a_loop_keep_their_places() -> None:
    lm = GraphNode("lm", ("x",), (GraphEdge("x", "lm"), GraphEdge("y", "b")))
    section = Parallel((Loop("turns", Sequential((lm, GraphNode("b", ("y",)))), cap="turns"),))
    graph = with_chunk_loops(one_walk(section, "x", policies={("lm", "run"): CHUNKED}))
    turns = next(iter(graph.walks["run"].sections))  # type: ignore[union-attr]
    inner = turns.body.sections[0]
    assert [str(edge) for edge in inner.outputs] == ["x -> lm", "y -> b"]
    assert inner.body.outputs == ()


@pytest.mark.behaviour("S0-58")
@pytest.mark.parametrize("name", ["stats", "token"])
def test_a_per_chunk_name_that_is_no_streaming_output_is_refused(name: str) -> None:
    policies = {("thinker", "thinker_prefill"): replace(CHUNKED, per_chunk_outputs=frozenset((name,)))}
    graph = replace(any_to_any(), chunking_policies=policies)
    with pytest.raises(
        GraphError, match=rf"per-chunk output '{name}', which is not a streaming .* are states"
    ):
        with_chunk_loops(graph)


def test_per_chunk_outputs_of_what_is_not_chunked_are_refused() -> None:
    policy = ChunkingPolicy(8, chunkable=False, per_chunk_outputs=frozenset(("y",)))
    graph = one_walk(GraphNode("a", ("x",), (GraphEdge("y", CLIENT),)), "x", policies={("a", "run"): policy})
    with pytest.raises(GraphError, match="names per-chunk outputs, but is not chunkable"):
        with_chunk_loops(graph)


def test_per_chunk_outputs_of_a_combined_walk_are_refused() -> None:
    policies = {(LLM, COMBINED): replace(CHUNKED, per_chunk_outputs=frozenset(("token",)))}
    with pytest.raises(
        GraphError, match="'prefill_decode' is a combined walk; name them in the policy of the"
    ):
        with_chunk_loops(replace(language_model(), chunking_policies=policies))
