"""What a walk's author can write down, and what is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest

from mstar.graph.errors import GraphError
from mstar.graph.nodes import (
    CLIENT,
    Counts,
    GraphEdge,
    GraphNode,
    Loop,
    Parallel,
    Sequential,
    StreamingGraphEdge,
    loops_of,
    nodes_of,
)

A = GraphNode("a", ("x",), (GraphEdge("y", "b"),))
B = GraphNode("b", ("y",))


def test_an_edge_feeds_the_input_of_its_own_name_unless_it_names_another() -> None:
    assert GraphEdge("y", "b").port == "y"
    assert GraphEdge("y", "b", "z").port == "z"


def test_sections_list_their_nodes_and_loops_in_order_of_declaration() -> None:
    inner = Loop("inner", B, cap="n")
    section = Sequential(
        (A, Parallel((Loop("outer", Sequential((inner, GraphNode("c", ("y",)))), cap="m"),)))
    )
    assert [node.name for node in nodes_of(section)] == ["a", "b", "c"]
    assert [loop.name for loop in loops_of(section)] == ["outer", "inner"]


def test_a_declaration_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        A.name = "z"  # type: ignore[misc]


def test_the_output_of_a_loop_over_one_node_is_of_that_node() -> None:
    loop = Loop("l", B, cap="n", outputs=(GraphEdge("z", CLIENT),))
    assert loop.source_of(loop.outputs[0]) == "b"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GraphNode("", ("x",)), r"the node name '' is not one"),
        (lambda: GraphNode("@client", ("x",)), r"does not begin with '@'"),
        (lambda: GraphNode("a", ()), r"node 'a' has no inputs, so nothing would ever start it"),
        (lambda: GraphNode("a", "prompt"), r"inputs of node 'a' is 'prompt', a str; give a tuple of names"),
        (lambda: GraphNode("a", ("x", "x")), r"node 'a' has the input 'x' twice"),
        (lambda: GraphNode("a", ("x",), ("y",)), r"an output of node 'a' is 'y', a str; give a GraphEdge"),
        (lambda: GraphNode("a", ("x",), (GraphEdge("y", "b"),) * 2), r"has the edge 'y -> b' twice"),
        (lambda: GraphNode("a", ("x",), (GraphEdge("y", "b", source="a"),)), r"only a Loop's outputs have"),
        (lambda: GraphEdge("y", ""), r"the node name '' is not one"),
        (lambda: GraphEdge("y", CLIENT, "z"), r"names the input 'z', but @client has none"),
        (lambda: StreamingGraphEdge("y", "b"), r"the streaming edge y -> b names no walk"),
        (lambda: StreamingGraphEdge("y", CLIENT, walk="w"), r"goes to @client; it goes to a node"),
        (lambda: Sequential(()), r"a Sequential is empty"),
        (lambda: Parallel([A, B]), r"a Parallel is .* a list; give a tuple of sections"),
        (lambda: Sequential((A, "b")), r"a section of a Sequential is 'b', a str"),
        (lambda: Sequential((A, B, A)), r"a walk has the node 'a' twice"),
        (lambda: Parallel((A, Sequential((B, A)))), r"a walk has the node 'a' twice"),
        (lambda: Sequential((Loop("l", A, cap="n"), Loop("l", B, cap="n"))), r"name of a Loop is 'l' twice"),
        (lambda: Loop("l", Loop("l", A, cap="n"), cap="n"), r"the name of a Loop is 'l' twice"),
        (lambda: Loop("l", A, cap=""), r"Loop 'l' has no cap, so nothing would end it"),
        (lambda: Loop("l", A, cap="n", start=-1), r"Loop 'l' starts at -1; give 0 or more"),
        (lambda: Loop("l", "a", cap="n"), r"the body of Loop 'l' is 'a', a str"),
        (
            lambda: Loop("l", Sequential((A, B)), cap="n", counts=Counts.TOKENS),
            r"Loop 'l' counts tokens, but its body is a Sequential",
        ),
        (
            lambda: Loop("l", Sequential((A, B)), cap="n", outputs=(GraphEdge("z", CLIENT),)),
            r"the output z -> @client of Loop 'l' has no source; give one of a, b",
        ),
        (
            lambda: Loop("l", A, cap="n", outputs=(GraphEdge("z", CLIENT, source="c"),)),
            r"has the source 'c', which its body lacks; give one of a",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_is_written(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        make()
