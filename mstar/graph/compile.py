"""Compiling a ModelGraph, once per worker, into the integer tables of a Program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mstar.graph.layout import Route, RouteKind, WalkLayout
from mstar.graph.model import ModelGraph
from mstar.graph.nodes import CLIENT, NEXT_WALK, Counts, Loop, StreamingGraphEdge
from mstar.graph.program import NONE, Edges, Loops, Places, Ports, Program, Ranges, WalkTable
from mstar.graph.rewrite import with_chunk_loops

__all__ = ["compile_graph"]

_INSIDE = (RouteKind.FORWARD, RouteKind.BACK)


def compile_graph(graph: ModelGraph) -> Program:
    """The tables of ``graph``, its chunkable nodes in their chunk Loops. Raises GraphError."""
    return _Compiler(with_chunk_loops(graph)).program()


class _Compiler:
    """Numbers everything walk by walk, in order of declaration, and writes a row for each."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self.walks = tuple(graph.walks)
        self.nodes = graph.nodes
        self.partitions = tuple(graph.partitions)
        self.layouts = [graph.layouts[walk] for walk in self.walks]
        self.first_place = _starts(len(layout.places) for layout in self.layouts)
        self.first_loop = _starts(len(layout.loops) for layout in self.layouts)
        places = [place for layout in self.layouts for place in layout.places]
        spans = [span for layout in self.layouts for span in layout.loops]
        self.routes = [(walk, route) for walk, layout in enumerate(self.layouts) for route in layout.routes]
        self.first_port = _starts(len(place.node.inputs) for place in places)
        self.loops = tuple(span.loop.name for span in spans)
        self.caps = tuple(dict.fromkeys(span.loop.cap for span in spans))
        self.outputs = tuple(dict.fromkeys(route.edge.name for _, route in self.routes))

    def program(self) -> Program:
        edges = [self._edge(walk, route) for walk, route in self.routes]
        place_edges: list[list[int]] = [[] for _ in range(self.first_place[-1])]
        loop_edges: list[list[int]] = [[] for _ in self.loops]
        back_edges: list[list[int]] = [[] for _ in self.loops]
        consumers: list[list[int]] = [[] for _ in range(self.first_place[-1])]
        for edge, ((walk, route), row) in enumerate(zip(self.routes, edges, strict=True)):
            _, place, _, leaving, _, scope = row
            if scope != NONE:
                back_edges[scope].append(edge)
            else:
                (place_edges[place] if leaving == NONE else loop_edges[leaving]).append(edge)
            target = self.first_place[walk] + route.target
            if route.kind in _INSIDE and target not in consumers[place]:
                consumers[place].append(target)
        ports = self._ports()
        combined = tuple(self.graph.combined)
        members = [[self.walks.index(walk) for walk in walks] for walks in self.graph.combined.values()]
        labels = self.walks + combined
        label_of = [[self._label(labels, node, walk) for walk in self.walks] for node in self.nodes]
        place_of = [[self._place(walk, node) for node in self.nodes] for walk in range(len(self.walks))]
        return Program(
            nodes=self.nodes,
            walks=self.walks,
            combined=combined,
            partitions=self.partitions,
            loops=self.loops,
            caps=self.caps,
            outputs=self.outputs,
            port_names=self._port_names(),
            edge_names=tuple(self._edge_name(walk, route) for walk, route in self.routes),
            place=Places(*_columns(3, self._places())),
            port=Ports(*_columns(5, ports)),
            edge=Edges(*_columns(6, edges)),
            loop=Loops(*_columns(7, self._loops())),
            walk=WalkTable(*_columns(7, [self._walk(walk) for walk in range(len(self.walks))])),
            walk_places=_ranges(_split(self.first_place)),
            walk_loops=_ranges(_split(self.first_loop)),
            place_ports=_ranges(_split(self.first_port)),
            place_edges=_ranges(place_edges),
            loop_edges=_ranges(loop_edges),
            back_edges=_ranges(back_edges),
            consumers=_ranges(consumers),
            ready=_ranges(self._ready(ports)),
            members=_ranges(members),
            place_of=_column(place_of),
            label_of=_column(label_of),
        )

    # ---- rows --------------------------------------------------------------------------------

    def _places(self) -> list[tuple[int, ...]]:
        return [
            (self.nodes.index(place.node.name), walk, self._loop_id(walk, place.loops[-1:]))
            for walk, layout in enumerate(self.layouts)
            for place in layout.places
        ]

    def _ports(self) -> list[tuple[int, ...]]:
        """(place, stream, outside, scope, back) of every port."""
        streams: set[int] = set()
        first: dict[int, int] = {}
        back: dict[int, int] = {}
        for walk, route in self.routes:
            if isinstance(route.edge, StreamingGraphEdge):
                streams.add(self._stream_port(route.edge))
            elif route.kind in _INSIDE:
                port = self._port_id(walk, route.target, route.port)
                (first if route.kind is RouteKind.FORWARD else back)[port] = self._scope(walk, route)
        return [
            (place, int(port in streams), int(port not in first), first.get(port, NONE), back.get(port, NONE))
            for place, ports in enumerate(_split(self.first_port))
            for port in ports
        ]

    def _edge(self, walk: int, route: Route) -> tuple[int, ...]:
        """(kind, place, output, exit, port, scope) of an edge."""
        port = NONE
        if isinstance(route.edge, StreamingGraphEdge):
            port = self._stream_port(route.edge)
        elif route.kind in _INSIDE:
            port = self._port_id(walk, route.target, route.port)
        return (
            route.kind,
            self.first_place[walk] + route.source,
            self.outputs.index(route.edge.name),
            self.first_loop[walk] + route.exit if route.exit >= 0 else NONE,
            port,
            self._scope(walk, route) if route.kind is RouteKind.BACK else NONE,
        )

    def _loops(self) -> list[tuple[int, ...]]:
        return [
            (
                walk,
                self._loop_id(walk, (span.parent,)) if span.parent >= 0 else NONE,
                self.first_place[walk] + span.first,
                self.first_place[walk] + span.last,
                span.loop.start,
                int(span.loop.counts is Counts.TOKENS),
                self.caps.index(span.loop.cap),
            )
            for walk, layout in enumerate(self.layouts)
            for span in layout.loops
        ]

    def _walk(self, walk: int) -> tuple[int, ...]:
        """(partition, next, first, ends, may_end, open, gate) of a walk."""
        name = self.walks[walk]
        partition = self.graph.partition_of(name)
        order = self.graph.partitions[partition]
        after = order.local_next(name)
        return (
            self.partitions.index(partition),
            NONE if after is None else self.walks.index(after),
            int(name in order.first),
            int(name in order.ends),
            int(name in order.ends or name in order.may_end),
            int(after is None and any(step.walk == name for step in order.transitions)),
            self.first_loop[walk] if isinstance(self.graph.walks[name], Loop) else NONE,
        )

    def _ready(self, ports: Sequence[tuple[int, ...]]) -> list[list[int]]:
        """The places of each walk that wait for nothing but what comes from outside, streams apart."""
        waits = {place for place, stream, outside, _, _ in ports if stream or not outside}
        return [[place for place in places if place not in waits] for places in _split(self.first_place)]

    # ---- ids ---------------------------------------------------------------------------------

    def _loop_id(self, walk: int, loop: tuple[int, ...]) -> int:
        return self.first_loop[walk] + loop[0] if loop else NONE

    def _scope(self, walk: int, route: Route) -> int:
        return self.first_loop[walk] + route.scope if route.scope >= 0 else NONE

    def _port_id(self, walk: int, place: int, port: int) -> int:
        return self.first_port[self.first_place[walk] + place] + port

    def _stream_port(self, edge: StreamingGraphEdge) -> int:
        walk = self.walks.index(edge.walk)
        layout = self.layouts[walk]
        place = layout.place_of[edge.to]
        return self._port_id(walk, place, layout.places[place].node.inputs.index(edge.port))

    def _place(self, walk: int, node: str) -> int:
        place = self.layouts[walk].place_of.get(node, NONE)
        return NONE if place == NONE else self.first_place[walk] + place

    def _label(self, labels: tuple[str, ...], node: str, walk: str) -> int:
        label = self.graph.combined_walk_of(node, walk)
        return NONE if label is None else labels.index(label)

    # ---- names -------------------------------------------------------------------------------

    def _port_names(self) -> tuple[str, ...]:
        return tuple(
            f"{layout.name}: {place.node.name}.{name}"
            for layout in self.layouts
            for place in layout.places
            for name in place.node.inputs
        )

    def _edge_name(self, walk: int, route: Route) -> str:
        edge = route.edge
        layout: WalkLayout = self.layouts[walk]
        to = edge.to if edge.to in (CLIENT, NEXT_WALK) else f"{edge.to}.{edge.port}"
        return f"{layout.name}: {layout.places[route.source].node.name}.{edge.name} -> {to}"


def _starts(sizes: Iterable[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))


def _split(starts: list[int]) -> list[list[int]]:
    return [list(range(start, end)) for start, end in pairwise(starts)]


def _column(values: object) -> NDArray[np.int32]:
    column = np.array(values, np.int32)
    column.flags.writeable = False
    return column


def _columns(count: int, rows: Sequence[tuple[int, ...]]) -> list[NDArray[np.int32]]:
    """``count`` columns of rows that are as long as that."""
    return [_column([row[at] for row in rows]) for at in range(count)]


def _ranges(rows: Sequence[Sequence[int]]) -> Ranges:
    return Ranges(_column(_starts(len(row) for row in rows)), _column([item for row in rows for item in row]))
