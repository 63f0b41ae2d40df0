"""Where the edges of one walk go, and which ones cannot."""

from __future__ import annotations

import pytest

from mstar.graph.errors import GraphError
from mstar.graph.layout import RouteKind, WalkLayout
from mstar.graph.nodes import (
    CLIENT,
    NEXT_WALK,
    GraphEdge,
    GraphNode,
    Loop,
    Parallel,
    Section,
    Sequential,
    StreamingGraphEdge,
)
from tests.graph.models import nested_loops


def node(name: str, inputs: str, *outputs: GraphEdge) -> GraphNode:
    return GraphNode(name, tuple(inputs.split()), outputs)


def kinds(layout: WalkLayout) -> dict[str, RouteKind]:
    return {f"{layout.places[r.source].node.name}.{r.edge}": r.kind for r in layout.routes}


def test_every_edge_of_nested_loops_goes_where_it_says() -> None:
    layout = WalkLayout("run", nested_loops().walks["run"])
    assert kinds(layout) == {
        "plan.seed -> code": RouteKind.FORWARD,
        "code.next -> code.seed": RouteKind.BACK,
        "mix.frame -> @client": RouteKind.CLIENT,
        "mix.state -> plan": RouteKind.BACK,
        "mix.state -> render": RouteKind.FORWARD,
        "render.video -> @client": RouteKind.CLIENT,
        "code.next -> mix.codes": RouteKind.FORWARD,
    }


def test_a_value_is_made_anew_by_the_loop_that_both_ends_share() -> None:
    layout = WalkLayout("run", nested_loops().walks["run"])
    scope = {str(r.edge): layout.loops[r.scope].loop.name if r.scope >= 0 else None for r in layout.routes}
    assert scope["seed -> code"] == scope["next -> mix.codes"] == scope["state -> plan"] == "frames"
    assert scope["next -> code.seed"] == "codes"
    assert scope["state -> render"] is None


def test_what_nobody_feeds_before_it_is_needed_comes_from_outside() -> None:
    layout = WalkLayout("run", nested_loops().walks["run"])
    assert [(layout.places[place].node.name, name) for place, name in layout.outside] == [
        ("plan", "scene"),
        ("plan", "state"),
        ("code", "voice"),
    ]


def test_a_node_that_joins_branches_takes_edges_of_each() -> None:
    branches = Parallel((node("a", "x", GraphEdge("y", "c")), node("b", "x", GraphEdge("z", "c"))))
    layout = WalkLayout("run", Sequential((branches, node("c", "y z"))))
    assert set(kinds(layout).values()) == {RouteKind.FORWARD}


def test_the_last_value_of_a_loop_can_be_carried_by_the_loop_around_it() -> None:
    inner = Loop("inner", node("a", "x"), cap="n", outputs=(GraphEdge("y", "a", "x"),))
    layout = WalkLayout("run", Loop("outer", inner, cap="m"))
    (route,) = layout.routes
    assert route.kind is RouteKind.BACK
    assert layout.loops[route.scope].loop.name == "outer"


def test_the_last_value_of_a_loop_goes_back_even_to_a_node_of_its_body_that_comes_later() -> None:
    body = Sequential((node("a", "x"), node("b", "z")))
    inner = Loop("inner", body, cap="n", outputs=(GraphEdge("y", "b", "z", source="a"),))
    layout = WalkLayout("run", Loop("outer", inner, cap="m"))
    assert [route.kind for route in layout.routes] == [RouteKind.BACK]
    with pytest.raises(GraphError, match="goes back outside of any Loop"):
        WalkLayout("run", inner)


LEAVES = r"leaves the Loop 'l' with every iteration; put it into the outputs of that Loop"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (node("a", "x", GraphEdge("y", "b")), r"the edge a.y -> b goes to 'b', which is not in this walk"),
        (
            Sequential((node("a", "x", GraphEdge("y", "b")), node("b", "z"))),
            r"the edge a.y -> b feeds no input of 'b'; these are z",
        ),
        (
            Sequential((node("a", "x"), node("b", "y", GraphEdge("x", "a")))),
            r"the edge b.x -> a goes back outside of any Loop",
        ),
        (node("a", "x", GraphEdge("x", "a")), r"the edge a.x -> a goes back outside of any Loop"),
        (
            Parallel((node("a", "x", GraphEdge("y", "b")), node("b", "y"))),
            r"a.y -> b goes from one branch of a Parallel to another",
        ),
        (
            Loop("l", Parallel((node("a", "x", GraphEdge("y", "b")), node("b", "y"))), cap="n"),
            r"a.y -> b goes from one branch of a Parallel to another",
        ),
        (
            Sequential((Loop("l", node("a", "x", GraphEdge("y", "b")), cap="n"), node("b", "y"))),
            LEAVES,
        ),
        (Loop("l", node("a", "x", GraphEdge("y", NEXT_WALK)), cap="n"), LEAVES),
        (
            Loop(
                "m",
                Sequential((Loop("l", node("a", "x", GraphEdge("y", "b")), cap="n"), node("b", "y"))),
                "m",
            ),
            LEAVES,
        ),
        (
            Sequential((node("a", "x", GraphEdge("y", "b"), GraphEdge("z", "b", "y")), node("b", "y"))),
            r"the input 'y' of 'b' is fed twice, by a.y -> b and by a.z -> b.y",
        ),
        (
            Loop(
                "l",
                Sequential((node("a", "x", GraphEdge("y", "b")), node("b", "y", GraphEdge("y", "b")))),
                "n",
            ),
            r"the input 'y' of 'b' is fed twice, by a.y -> b and by b.y -> b",
        ),
    ],
)
def test_edges_that_cannot_be_meant_are_refused_with_the_walk_and_the_edge(
    section: Section, message: str
) -> None:
    with pytest.raises(GraphError, match=f"walk 'run': .*{message}"):
        WalkLayout("run", section)


def test_streams_and_edges_to_the_client_may_leave_a_loop_with_every_iteration() -> None:
    stream = StreamingGraphEdge("z", "far", walk="elsewhere")
    layout = WalkLayout("run", Loop("l", node("a", "x", GraphEdge("y", CLIENT), stream), cap="n"))
    assert [route.kind for route in layout.routes] == [RouteKind.CLIENT, RouteKind.STREAM]
    assert all(route.exit < 0 for route in layout.routes)


def test_a_first_value_from_before_the_loop_and_one_carried_back_feed_one_input() -> None:
    loop = Loop("l", node("b", "y", GraphEdge("y", "b")), cap="n")
    layout = WalkLayout("run", Sequential((node("a", "x", GraphEdge("y", "b")), loop)))
    assert [route.kind for route in layout.routes] == [RouteKind.FORWARD, RouteKind.BACK]
