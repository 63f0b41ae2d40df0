"""WalkLayout: the nodes of one walk in order, and where each of its edges goes.

The checks that take the whole walk to make are made here.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from mstar.graph.errors import GraphError
from mstar.graph.nodes import (
    CLIENT,
    NEXT_WALK,
    GraphEdge,
    GraphNode,
    Loop,
    Parallel,
    Section,
    StreamingGraphEdge,
)

__all__ = ["LoopSpan", "Place", "Route", "RouteKind", "WalkLayout"]


class RouteKind(IntEnum):
    """What becomes of the value on an edge."""

    FORWARD = 0
    """It feeds a later node of the walk."""
    BACK = 1
    """It feeds the next iteration of a Loop."""
    CLIENT = 2
    """It leaves the graph."""
    NEXT = 3
    """It is kept for the walk that follows."""
    STREAM = 4
    """It is a piece of a stream into another partition."""


class Place(NamedTuple):
    """A node in a walk. ``loops`` are the Loops around it, outermost first, ``branches`` the branches of
    Parallels, as (number of the Parallel, branch).
    """

    node: GraphNode
    loops: tuple[int, ...]
    branches: tuple[tuple[int, int], ...]


class LoopSpan(NamedTuple):
    """A Loop in a walk: the Loop around it (-1: none), and the places [first, last) of its body."""

    loop: Loop
    parent: int
    first: int
    last: int


class Route(NamedTuple):
    """Where an edge goes. It leaves with every completion of place ``source`` or, when ``exit`` is a
    Loop and not -1, when that Loop ends.

    ``target`` and ``port`` are a place and the position of one of its inputs, -1 outside the walk.
    ``scope`` is the innermost Loop that source and target share, so that the value is made anew with each of
    its iterations; -1 for none. A BACK route belongs to it.
    """

    edge: GraphEdge
    source: int
    exit: int
    kind: RouteKind
    target: int
    port: int
    scope: int


class WalkLayout:
    """One walk, flattened. Raises GraphError where its parts contradict each other.

    ``outside`` are the (place, input) that no node of the walk feeds before they are needed.
    """

    def __init__(self, name: str, section: Section) -> None:
        self.name = name
        self.places: list[Place] = []
        self.loops: list[LoopSpan] = []
        self._parallels = 0
        self._flatten(section, (), ())
        self.place_of = {place.node.name: index for index, place in enumerate(self.places)}
        self.routes: list[Route] = [
            self._route(edge, source, -1)
            for source, place in enumerate(self.places)
            for edge in place.node.outputs
        ]
        self.routes += [
            self._route(edge, self.place_of[span.loop.source_of(edge)], index)
            for index, span in enumerate(self.loops)
            for edge in span.loop.outputs
        ]
        self.outside = self._find_outside()

    def outputs_to_next(self) -> frozenset[str]:
        """Names of the outputs that are kept for the walk that follows."""
        return frozenset(route.edge.name for route in self.routes if route.kind is RouteKind.NEXT)

    def _flatten(
        self, section: Section, loops: tuple[int, ...], branches: tuple[tuple[int, int], ...]
    ) -> None:
        if isinstance(section, GraphNode):
            self.places.append(Place(section, loops, branches))
        elif isinstance(section, Loop):
            index, first = len(self.loops), len(self.places)
            parent = loops[-1] if loops else -1
            self.loops.append(LoopSpan(section, parent, first, first))
            self._flatten(section.body, (*loops, index), branches)
            self.loops[index] = LoopSpan(section, parent, first, len(self.places))
        else:
            self._parallels += 1
            number, parallel = self._parallels, isinstance(section, Parallel)
            for branch, inner in enumerate(section.sections):
                self._flatten(inner, loops, (*branches, (number, branch)) if parallel else branches)

    def _route(self, edge: GraphEdge, source: int, leaving: int) -> Route:
        """Resolve one edge of place ``source``, or of the outputs of Loop ``leaving`` where that isn't -1."""
        place = self.places[source]
        around = place.loops if leaving < 0 else place.loops[: place.loops.index(leaving)]
        if isinstance(edge, StreamingGraphEdge):
            return Route(edge, source, leaving, RouteKind.STREAM, -1, -1, -1)
        if edge.to == CLIENT:
            return Route(edge, source, leaving, RouteKind.CLIENT, -1, -1, -1)
        what = f"walk {self.name!r}: the edge {place.node.name}.{edge}"
        if edge.to == NEXT_WALK:
            if around:
                raise self._leaves(what, around[0])
            return Route(edge, source, leaving, RouteKind.NEXT, -1, -1, -1)
        target = self.place_of.get(edge.to, -1)
        if target < 0:
            known = ", ".join(self.place_of)
            raise GraphError(f"{what} goes to {edge.to!r}, which is not in this walk; its nodes are {known}")
        consumer = self.places[target]
        if edge.port not in consumer.node.inputs:
            known = ", ".join(consumer.node.inputs)
            raise GraphError(f"{what} feeds no input of {edge.to!r}; these are {known}")
        shared = 0
        for a, b in zip(around, consumer.loops, strict=False):
            if a != b:
                break
            shared += 1
        if shared < len(around):
            raise self._leaves(what, around[shared])
        branch = dict(consumer.branches)
        if any(branch.get(number, at) != at for number, at in place.branches):
            raise GraphError(
                f"{what} goes from one branch of a Parallel to another; put the two nodes into one branch "
                "or use a Sequential"
            )
        scope = around[-1] if around else -1
        port = consumer.node.inputs.index(edge.port)
        ahead = target > source and (leaving < 0 or target >= self.loops[leaving].last)
        if ahead:
            return Route(edge, source, leaving, RouteKind.FORWARD, target, port, scope)
        if scope < 0:
            raise GraphError(
                f"{what} goes back outside of any Loop; put both nodes into a Loop, or declare the consumer "
                "after the producer"
            )
        return Route(edge, source, leaving, RouteKind.BACK, target, port, scope)

    def _leaves(self, what: str, loop: int) -> GraphError:
        name = self.loops[loop].loop.name
        return GraphError(
            f"{what} leaves the Loop {name!r} with every iteration; put it into the outputs of that Loop, "
            "so that it leaves once, when the Loop ends"
        )

    def _find_outside(self) -> list[tuple[int, str]]:
        """Check that no input is fed twice; returns the inputs that come from outside the walk."""
        fed: dict[tuple[int, int, bool], Route] = {}
        for route in self.routes:
            if route.target < 0:
                continue
            key = route.target, route.port, route.kind is RouteKind.BACK
            other = fed.setdefault(key, route)
            if other is not route:
                raise self._fed_twice(route, other)
        for (target, port, back), route in fed.items():
            first = fed.get((target, port, False))
            # A first value that is made anew in every iteration leaves the one carried back no room.
            if back and first is not None and self._within(first.scope, route.scope):
                raise self._fed_twice(route, first)
        return [
            (target, name)
            for target, place in enumerate(self.places)
            for port, name in enumerate(place.node.inputs)
            if (target, port, False) not in fed
        ]

    def _within(self, loop: int, outer: int) -> bool:
        """Whether ``loop`` is ``outer`` or inside of it."""
        while loop >= 0 and loop != outer:
            loop = self.loops[loop].parent
        return loop == outer

    def _fed_twice(self, route: Route, other: Route) -> GraphError:
        a, b = (f"{self.places[r.source].node.name}.{r.edge}" for r in (other, route))
        consumer = self.places[route.target].node
        return GraphError(
            f"walk {self.name!r}: the input {consumer.inputs[route.port]!r} of {consumer.name!r} is fed "
            f"twice, by {a} and by {b}; give the second an input of its own"
        )
