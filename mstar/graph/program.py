"""Program: a model's graph as integer tables. Names are kept for messages, and to resolve ids once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.graph.errors import GraphError

__all__ = ["NONE", "Edges", "Loops", "Places", "Ports", "Program", "Ranges", "WalkTable"]

NONE = -1
"""No such id."""

Column = NDArray[np.int32]


class Ranges(NamedTuple):
    """A list of ids for each row, laid end to end: row i has items[start[i] : start[i + 1]]."""

    start: Column
    items: Column

    def of(self, row: int) -> list[int]:
        """The ids of one row."""
        ids: list[int] = self.items[self.start[row] : self.start[row + 1]].tolist()
        return ids


class Places(NamedTuple):
    """Columns by place, which is a node in a walk; the places of a walk follow each other.

    ``loop`` is the innermost Loop around it, or NONE.
    """

    node: Column
    walk: Column
    loop: Column


class Ports(NamedTuple):
    """Columns by port, which is an input of a place; the ports of a place follow each other.

    ``stream`` is 1 where a stream feeds it, anew for each pass. ``outside`` is 1 where its first value
    is not of the walk: it comes with the request, from the walk before or from a stream. ``scope`` is
    the Loop in each of whose iterations its first value is made anew, NONE where that is once a walk.
    ``back`` is the Loop that carries a value back to it, or NONE.
    """

    place: Column
    stream: Column
    outside: Column
    scope: Column
    back: Column


class Edges(NamedTuple):
    """Columns by edge.

    ``kind`` is a layout.RouteKind, ``place`` makes the value and ``output`` is that output's id.
    ``port`` is what it feeds, for a stream in another walk; NONE to the client and the next walk.
    ``scope`` is the Loop with whose next iteration an edge leaves that goes back, else NONE. ``exit`` is
    the Loop whose output it is, with whose end it leaves unless it goes back, or NONE.
    """

    kind: Column
    place: Column
    output: Column
    exit: Column
    port: Column
    scope: Column


class Loops(NamedTuple):
    """Columns by Loop: its walk, the Loop around it or NONE, its body as places [first, last), where its
    counter starts, whether it counts tokens (1) or iterations (0), and the id of its cap.
    """

    walk: Column
    parent: Column
    first: Column
    last: Column
    start: Column
    tokens: Column
    cap: Column


class WalkTable(NamedTuple):
    """Columns by walk. ``next`` is the walk that a worker goes on to by itself, or NONE.

    ``first`` is 1 where its partition may begin with it, ``ends`` where it may end it, ``may_end`` where
    a token sampled in it may, ``open`` where others decide which walk follows. ``gate`` is the Loop that is
    the whole walk, NONE where it is more.
    """

    partition: Column
    next: Column
    first: Column
    ends: Column
    may_end: Column
    open: Column
    gate: Column


class Program(NamedTuple):
    """The compiled graph: ids count from 0 in order of declaration, columns are int32 and read-only.

    ``nodes`` to ``edge_names`` are the names by id. ``walk_places``, ``place_ports`` and so on list the
    ids that belong to a row; ``ready`` the places of a walk that can run once all its inputs from
    outside are there, streams apart. ``place_edges`` leave with each completion of a place, ``loop_edges``
    when a Loop ends, ``back_edges`` when it begins another iteration. ``consumers`` are the places that a
    place feeds within its walk.
    ``place_of`` is [walks, nodes], NONE where the node is not in the walk. A step runs under a label: a
    walk's id, or ``len(walks) + c`` for combined walk c, whose members are ``members.of(c)``;
    ``label_of`` [nodes, walks] is the label of the combined walk of a node and walk, or NONE.
    """

    nodes: tuple[str, ...]
    walks: tuple[str, ...]
    combined: tuple[str, ...]
    partitions: tuple[str, ...]
    loops: tuple[str, ...]
    caps: tuple[str, ...]
    outputs: tuple[str, ...]
    port_names: tuple[str, ...]
    edge_names: tuple[str, ...]
    place: Places
    port: Ports
    edge: Edges
    loop: Loops
    walk: WalkTable
    walk_places: Ranges
    walk_loops: Ranges
    place_ports: Ranges
    place_edges: Ranges
    loop_edges: Ranges
    back_edges: Ranges
    consumers: Ranges
    ready: Ranges
    members: Ranges
    place_of: Column
    label_of: Column

    @property
    def labels(self) -> tuple[str, ...]:
        """What a step can run under: the walks, then the combined walks."""
        return self.walks + self.combined

    def node_id(self, name: str) -> int:
        """The id of node ``name``. Raises GraphError."""
        return _id_of("node", name, self.nodes)

    def walk_id(self, name: str) -> int:
        """The id of walk ``name``, or the label of the combined walk. Raises GraphError."""
        return _id_of("walk", name, self.labels)

    def loop_id(self, name: str) -> int:
        """The id of Loop ``name``. Raises GraphError."""
        return _id_of("Loop", name, self.loops)

    def output_id(self, name: str) -> int:
        """The id of the outputs called ``name``. Raises GraphError."""
        return _id_of("output", name, self.outputs)

    def port_id(self, walk: str, node: str, name: str) -> int:
        """The id of input ``name`` of ``node`` in ``walk``. Raises GraphError."""
        return _id_of("input", f"{walk}: {node}.{name}", self.port_names)

    def caps_of(self, values: Mapping[str, int]) -> dict[int, int]:
        """Loop id -> cap, of the Loops whose caps ``values`` gives by name. Raises GraphError."""
        caps = {_id_of("cap", name, self.caps): value for name, value in values.items()}
        return {loop: caps[cap] for loop, cap in enumerate(self.loop.cap.tolist()) if cap in caps}


def _id_of(kind: str, name: str, known: tuple[str, ...]) -> int:
    if name not in known:
        raise GraphError(f"there is no {kind} {name!r}; there are {', '.join(known) or 'none'}")
    return known.index(name)
