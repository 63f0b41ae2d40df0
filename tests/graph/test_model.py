"""A model's whole declaration: what only all of it together can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mstar.graph.errors import GraphError
from mstar.graph.model import ModelGraph
from mstar.graph.nodes import NEXT_WALK, GraphEdge, GraphNode, Loop, StreamingGraphEdge
from mstar.graph.policy import NO_CHUNKING, ChunkingPolicy
from mstar.graph.schedule import Transition, WalkOrder
from mstar.model.graphs import COMBINED, DECODE, LLM, PREFILL, language_model
from tests.graph.models import any_to_any, one_walk

ENDS_RUN = frozenset(("run",))


def two_partitions(edge: StreamingGraphEdge, consumer: GraphNode, *given: str, **more: Any) -> ModelGraph:
    """The node "a" of partition one streams to ``consumer``, the walk "take" of partition two."""
    return ModelGraph(
        walks={"make": GraphNode("a", ("x",), (edge,)), "take": consumer, **more},
        partitions={
            "one": WalkOrder(("make", *more), frozenset(("make", *more)), inputs={"make": ("x",)}),
            "two": WalkOrder(("take",), frozenset(("take",)), inputs={"take": given} if given else {}),
        },
    )


def test_questions_about_a_language_model() -> None:
    graph = language_model()
    assert graph.nodes == (LLM,)
    assert graph.walks_of(LLM) == (PREFILL, DECODE)
    assert graph.combined_walk_of(LLM, PREFILL) == COMBINED
    assert graph.partition_of(DECODE) == LLM


def test_questions_about_a_composite_model() -> None:
    graph = any_to_any()
    assert graph.walks_of("talker") == ("talker_prefill", "talker_decode")
    assert graph.combined_walk_of("thinker", "thinker_decode") == "thinker_mixed"
    assert graph.combined_walk_of("image_encoder", "thinker_prefill") is None
    assert graph.policy("codec", "decode_audio") == NO_CHUNKING


def test_a_declaration_is_a_copy_of_what_it_was_made_of() -> None:
    walks = dict(language_model().walks)
    graph = replace(language_model(), walks=walks)
    walks.clear()
    assert set(graph.walks) == {PREFILL, DECODE}


def test_a_stream_can_feed_what_the_consumer_does_not_make_itself() -> None:
    graph = two_partitions(StreamingGraphEdge("y", "b", walk="take"), GraphNode("b", ("y",)))
    assert graph.nodes == ("a", "b")


@pytest.mark.parametrize(
    ("edge", "consumer", "given", "message"),
    [
        (
            StreamingGraphEdge("y", "b", walk="take"),
            GraphNode("b", ("y",)),
            ("y",),
            r"a.y -> b feeds an input that comes with the request",
        ),
        (
            StreamingGraphEdge("y", "b", walk="taken"),
            GraphNode("b", ("y",)),
            (),
            r"a.y -> b names walk 'taken', which does not exist; there are make, take",
        ),
        (
            StreamingGraphEdge("y", "c", walk="take"),
            GraphNode("b", ("y",)),
            ("y",),
            r"goes, in walk 'take', to node 'c', which does not exist; there are b",
        ),
        (
            StreamingGraphEdge("y", "b", "w", walk="take"),
            GraphNode("b", ("y",)),
            ("y",),
            r"feeds, in walk 'take', input 'w', which does not exist; there are y",
        ),
        (
            StreamingGraphEdge("y", "a", "x", walk="make"),
            GraphNode("b", ("y",)),
            ("y",),
            r"stays within its partition; a stream joins two partitions",
        ),
        (
            StreamingGraphEdge("y", "b", walk="take"),
            Loop("l", GraphNode("b", ("y",), (GraphEdge("y", "b"),)), cap="n"),
            (),
            r"feeds an input that a Loop carries back",
        ),
    ],
)
def test_a_stream_that_leads_nowhere_is_refused(
    edge: StreamingGraphEdge, consumer: GraphNode, given: tuple[str, ...], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        two_partitions(edge, consumer, *given)


def chain(first: GraphNode, second: GraphNode, **inputs: tuple[str, ...]) -> ModelGraph:
    order = WalkOrder(("p",), frozenset("q"), (Transition("p", "q", local=True),), inputs=inputs)
    return ModelGraph({"p": first, "q": second}, {"main": order})


def test_an_input_comes_from_the_request_or_from_the_walk_before() -> None:
    keeps = GraphNode("a", ("x",), (GraphEdge("y", NEXT_WALK),))
    chain(keeps, GraphNode("a", ("y",)), p=("x",))
    chain(GraphNode("a", ("x",)), GraphNode("a", ("y",)), p=("x",), q=("y",))


@pytest.mark.parametrize(
    ("first", "second", "inputs", "message"),
    [
        (
            GraphNode("a", ("x",)),
            GraphNode("a", ("y",)),
            {"p": ("x",)},
            r"nobody produces the input 'y' of node 'a' when walk 'q' follows 'p'; send an output of",
        ),
        (
            GraphNode("a", ("x",)),
            GraphNode("a", ("x",)),
            {"q": ("x",)},
            r"nobody produces the input 'x' of node 'a' in walk 'p', which partition 'main' may begin with",
        ),
        (
            GraphNode("a", ("x",), (GraphEdge("y", NEXT_WALK),)),
            GraphNode("a", ("x",)),
            {"p": ("x",), "q": ("x",)},
            r"walk 'p' keeps the output 'y' for the next walk, but none that follows has an input",
        ),
        (
            GraphNode("a", ("x",)),
            GraphNode("a", ("x",)),
            {"p": ("x", "promt"), "q": ("x",)},
            r"gives walk 'p' the input 'promt', which does not exist; there are x",
        ),
    ],
)
def test_an_input_that_nobody_produces_or_takes_is_refused(
    first: GraphNode, second: GraphNode, inputs: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        chain(first, second, **inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"walks": {}}, r"a model without walks runs nothing"),
        ({"partitions": {}}, r"walk 'prefill' is part of no partition"),
        (
            {"partitions": {"a": WalkOrder(("prefil",), frozenset(("prefil",)))}},
            r"partition 'a' names walk 'prefil', which does not exist; there are prefill, decode",
        ),
        ({"combined": {"decode": (PREFILL, DECODE)}}, r"'decode' names a walk and a combined walk"),
        ({"combined": {"mix": (PREFILL,)}}, r"combined walk 'mix' is of prefill; name two or more"),
        ({"combined": {"mix": (PREFILL, "dec")}}, r"combined walk 'mix' names walk 'dec', which does not"),
        (
            {"combined": {COMBINED: (PREFILL, DECODE), "mix": (DECODE, PREFILL)}},
            r"on node 'llm', walk 'decode' is part of the combined walks 'prefill_decode' and 'mix'",
        ),
        (
            {"chunking_policies": {("lm", PREFILL): NO_CHUNKING}},
            r"a chunking policy names node 'lm', which does not exist; there are llm",
        ),
        (
            {"chunking_policies": {(LLM, "prefil"): NO_CHUNKING}},
            r"policy of node 'llm' names walk 'prefil', which does not exist; there are prefill, decode, ",
        ),
    ],
)
def test_names_that_do_not_exist_are_refused_with_those_that_do(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        replace(language_model(), **changes)


def test_walks_that_share_no_node_share_no_step() -> None:
    edge = StreamingGraphEdge("y", "b", walk="take")
    graph = two_partitions(edge, GraphNode("b", ("y",)))
    with pytest.raises(GraphError, match="have no node in common"):
        replace(graph, combined={"both": ("make", "take")})


def test_a_node_belongs_to_one_partition() -> None:
    edge = StreamingGraphEdge("y", "a", walk="take")
    with pytest.raises(GraphError, match="node 'a' is part of 'one' and 'two'"):
        two_partitions(edge, GraphNode("a", ("y",)))


def test_a_walk_belongs_to_one_partition() -> None:
    graph = one_walk(GraphNode("a", ("x",)), "x")
    order = graph.partitions["main"]
    with pytest.raises(GraphError, match="walk 'run' is part of 'main' and 'other'"):
        replace(graph, partitions={"main": order, "other": order})


def test_two_walks_do_not_share_the_name_of_a_loop() -> None:
    first = Loop("l", GraphNode("a", ("x",)), cap="n")
    order = WalkOrder(("p", "q"), frozenset("pq"), inputs={"p": ("x",), "q": ("x",)})
    with pytest.raises(GraphError, match="walks 'p' and 'q' both have a Loop 'l'"):
        ModelGraph({"p": first, "q": first}, {"main": order})


def test_a_policy_may_be_of_a_combined_walk_only_where_its_node_is_in_all_of_it() -> None:
    policies = {("audio_encoder", "thinker_mixed"): ChunkingPolicy(4, True)}
    with pytest.raises(GraphError, match="node 'audio_encoder' names walk 'thinker_mixed'"):
        replace(any_to_any(), chunking_policies=policies)
