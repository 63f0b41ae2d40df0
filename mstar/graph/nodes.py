"""GraphNode, Sequential, Parallel, Loop and the edges between nodes: a walk, as its author writes it down.

Frozen structures that check themselves when they are made; what only the whole walk can tell (edges to
nodes that do not exist, inputs that nobody produces) is checked by the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from mstar.graph.errors import GraphError

__all__ = [
    "CLIENT",
    "NEXT_WALK",
    "Counts",
    "GraphEdge",
    "GraphNode",
    "Loop",
    "Parallel",
    "Section",
    "Sequential",
    "StreamingGraphEdge",
    "check_name",
    "loops_of",
    "nodes_of",
]

CLIENT = "@client"
"""Where an edge goes that leaves the graph: to whoever owns the request."""

NEXT_WALK = "@next"
"""Where an edge goes whose value is kept for the input of the same name in the walk that follows."""


class Counts(Enum):
    """What a Loop counts: its iterations, or the tokens that its one node runs in them."""

    ITERATIONS = "iterations"
    TOKENS = "tokens"


def check_name(kind: str, name: object) -> None:
    """Raise GraphError unless ``name`` can name a ``kind``: text, not empty, without the reserved '@'."""
    if not isinstance(name, str) or not name or name != name.strip() or name.startswith("@"):
        raise GraphError(
            f"the {kind} name {name!r} is not one: give text that is not empty, has no space around it "
            "and does not begin with '@'"
        )


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """The output ``name`` of a node goes to ``input`` of node ``to``, or to CLIENT or NEXT_WALK.

    ``input`` is the output's name where it isn't given. ``source`` names the node of a Loop's body that
    makes the output; only the outputs of a Loop whose body has several nodes need it. Raises GraphError.
    """

    name: str
    to: str
    input: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        check_name("output", self.name)
        if self.to not in (CLIENT, NEXT_WALK):
            check_name("node", self.to)
        elif self.input:
            raise GraphError(
                f"the edge {self} names the input {self.input!r}, but {self.to} has none; leave input out"
            )

    @property
    def port(self) -> str:
        """The name of the input that this edge feeds."""
        return self.input or self.name

    def __str__(self) -> str:
        return f"{self.name} -> {self.to}" + (f".{self.port}" if self.port != self.name else "")


@dataclass(frozen=True, slots=True)
class StreamingGraphEdge(GraphEdge):
    """An edge into another partition: its pieces leave one by one, and the consumer runs when it can.

    ``walk`` is the walk that the consumer runs for a piece; the producer's pass decides it. Such an
    edge may leave a Loop with every iteration, and a pass may make no piece for it. Raises GraphError.
    """

    walk: str = ""

    def __post_init__(self) -> None:
        GraphEdge.__post_init__(self)
        if self.to in (CLIENT, NEXT_WALK):
            raise GraphError(f"the streaming edge {self.name!r} goes to {self.to}; it goes to a node")
        if not self.walk:
            raise GraphError(
                f"the streaming edge {self} names no walk; give the walk that {self.to!r} runs for a piece"
            )


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node in a walk: it runs once all its ``inputs`` are there, and feeds the edges in ``outputs``.

    The same name in several walks is the same node. Raises GraphError.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[GraphEdge, ...] = ()

    def __post_init__(self) -> None:
        check_name("node", self.name)
        _check_tuple(f"inputs of node {self.name!r}", self.inputs, "a tuple of names")
        _check_tuple(f"outputs of node {self.name!r}", self.outputs, "a tuple of edges")
        if not self.inputs:
            raise GraphError(
                f"node {self.name!r} has no inputs, so nothing would ever start it; name at least one"
            )
        for name in self.inputs:
            check_name("input", name)
        _check_once(f"node {self.name!r} has the input", self.inputs)
        _check_edges(f"node {self.name!r}", self.outputs)
        for edge in self.outputs:
            if edge.source:
                raise GraphError(
                    f"the edge {edge} of node {self.name!r} names a source; only a Loop's outputs have one"
                )


@dataclass(frozen=True, slots=True)
class Sequential:
    """Sections one after the other: edges between them go forward only. When a node runs is up to its
    inputs alone. Raises GraphError.
    """

    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        _check_sections("Sequential", self.sections)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Branches that do not wait for each other: no edge goes from one to another; a later node that
    takes inputs from several of them joins them. Raises GraphError.
    """

    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        _check_sections("Parallel", self.sections)


@dataclass(frozen=True, slots=True)
class Loop:
    """Runs ``body`` until the counter reaches the cap that the request has for the name ``cap``.

    The counter begins at ``start``: what the cap includes, but was counted before the Loop began, as the
    token that a prefill samples is part of a budget of tokens. So there are ``cap - start`` counts left
    to make. An edge from the body to a node before its source, or to the source itself, goes back: its
    value is carried into the next iteration, when there is one. Inputs from outside are held through the
    Loop. Edges in ``outputs`` leave when the Loop ends, with the values of the last iteration; an edge of
    the body may only leave the Loop to CLIENT or as a StreamingGraphEdge, and does so with every
    iteration. Raises GraphError.
    """

    name: str
    body: Section
    cap: str
    outputs: tuple[GraphEdge, ...] = ()
    counts: Counts = Counts.ITERATIONS
    start: int = 0

    def __post_init__(self) -> None:
        check_name("Loop", self.name)
        if not self.cap:
            raise GraphError(
                f"Loop {self.name!r} has no cap, so nothing would end it; give the name of a number "
                "that a request sets when it is admitted"
            )
        check_name("cap", self.cap)
        _check_section(f"the body of Loop {self.name!r}", self.body)
        _check_once("the name of a Loop is", (self.name, *(loop.name for loop in loops_of(self.body))))
        _check_tuple(f"outputs of Loop {self.name!r}", self.outputs, "a tuple of edges")
        _check_edges(f"Loop {self.name!r}", self.outputs)
        if self.start < 0:
            raise GraphError(f"Loop {self.name!r} starts at {self.start}; give 0 or more")
        if self.counts is Counts.TOKENS and not isinstance(self.body, GraphNode):
            raise GraphError(
                f"Loop {self.name!r} counts tokens, but its body is a {type(self.body).__name__}; "
                "the tokens counted are those of one GraphNode"
            )
        inside = [node.name for node in nodes_of(self.body)]
        for edge in self.outputs:
            if not edge.source and len(inside) > 1:
                raise GraphError(
                    f"the output {edge} of Loop {self.name!r} has no source; give one of {', '.join(inside)}"
                )
            if edge.source and edge.source not in inside:
                raise GraphError(
                    f"the output {edge} of Loop {self.name!r} has the source {edge.source!r}, which its "
                    f"body lacks; give one of {', '.join(inside)}"
                )

    def source_of(self, edge: GraphEdge) -> str:
        """The name of the node that makes the value of ``edge``, one of ``outputs``."""
        return edge.source or next(nodes_of(self.body)).name


Section = GraphNode | Sequential | Parallel | Loop


def nodes_of(section: Section) -> Iterator[GraphNode]:
    """The nodes of ``section`` in the order they are declared."""
    if isinstance(section, GraphNode):
        yield section
    elif isinstance(section, Loop):
        yield from nodes_of(section.body)
    else:
        for inner in section.sections:
            yield from nodes_of(inner)


def loops_of(section: Section) -> Iterator[Loop]:
    """The Loops of ``section``, an outer one before those in it."""
    if isinstance(section, Loop):
        yield section
        yield from loops_of(section.body)
    elif not isinstance(section, GraphNode):
        for inner in section.sections:
            yield from loops_of(inner)


def _check_tuple(what: str, value: object, wanted: str) -> None:
    if not isinstance(value, tuple):
        raise GraphError(f"{what} is {value!r}, a {type(value).__name__}; give {wanted}")


def _check_section(what: str, value: object) -> None:
    if not isinstance(value, GraphNode | Sequential | Parallel | Loop):
        raise GraphError(
            f"{what} is {value!r}, a {type(value).__name__}; give a GraphNode, Sequential, Parallel or Loop"
        )


def _check_sections(kind: str, sections: object) -> None:
    _check_tuple(f"a {kind}", sections, "a tuple of sections")
    if not isinstance(sections, tuple) or not sections:
        raise GraphError(f"a {kind} is empty; give it at least one section")
    for section in sections:
        _check_section(f"a section of a {kind}", section)
    _check_once("a walk has the node", [node.name for section in sections for node in nodes_of(section)])
    _check_once("the name of a Loop is", [loop.name for section in sections for loop in loops_of(section)])


def _check_edges(owner: str, edges: tuple[GraphEdge, ...]) -> None:
    for edge in edges:
        if not isinstance(edge, GraphEdge):
            raise GraphError(f"an output of {owner} is {edge!r}, a {type(edge).__name__}; give a GraphEdge")
    _check_once(f"{owner} has the edge", [f"{edge.source}.{edge}".lstrip(".") for edge in edges])


def _check_once(what: str, names: tuple[str, ...] | list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise GraphError(f"{what} {name!r} twice; give each a name of its own")
        seen.add(name)
