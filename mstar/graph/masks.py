"""Masks: a Program's tables as the bitsets that routing one slot works with.

A bitset is a Python int: over the places and ports of a walk, over the Loops of a walk, over nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mstar.graph.errors import GraphError
from mstar.graph.layout import RouteKind
from mstar.graph.program import NONE, Program

__all__ = ["Masks"]


class Masks:
    """Lists by id. ``here`` are the nodes that run on this worker, None for all of them.

    Places of other nodes count as done from the start, and what they make arrives from outside. Raises
    GraphError for a Loop that has only some of its nodes here.
    """

    def __init__(self, program: Program, here: Collection[int] | None = None) -> None:
        place, port, edge, walk = program.place, program.port, program.edge, program.walk
        walks, loops = range(len(program.walks)), range(len(program.loops))
        self.node: list[int] = place.node.tolist()
        self.node_bit = [1 << node for node in range(len(program.nodes))]
        self._ours = [here is None or node in here for node in self.node]

        self.place_bit = [0] * len(self.node)
        self.port_bit = [0] * len(program.port_names)
        for w in walks:
            places = program.walk_places.of(w)
            for at, p in enumerate(places):
                self.place_bit[p] = 1 << at
            for at, q in enumerate(q for p in places for q in program.place_ports.of(p)):
                self.port_bit[q] = 1 << at

        self.port_place: list[int] = port.place.tolist()
        self.port_walk: list[int] = place.walk[port.place].tolist()
        maker = {
            q: p
            for q, p, k in zip(edge.port.tolist(), edge.place.tolist(), edge.kind.tolist(), strict=True)
            if k == RouteKind.FORWARD
        }
        self.outside = [
            bool(first) or not self._ours[maker[q]] for q, first in enumerate(port.outside.tolist())
        ]
        stream = [bool(flag) for flag in port.stream.tolist()]
        ports = [program.place_ports.of(p) for p in range(len(self.node))]
        self.needs = [self._ports(qs) for qs in ports]

        self._set_loops(program)
        streams = [self._ports(q for q in qs if stream[q]) for qs in ports]
        # A Loop that counts tokens cuts what it was given: it holds all of that until its end.
        keeps = [at != NONE and self.counts_tokens[at] for at in self.loop]
        self.streams = [0 if keep else bits for keep, bits in zip(keeps, streams, strict=True)]
        self.kept_streams = [bits if keep else 0 for keep, bits in zip(keeps, streams, strict=True)]

        self.edge_output: list[int] = edge.output.tolist()
        self.edge_place: list[int] = edge.place.tolist()
        self.edge_port: list[int] = edge.port.tolist()
        kinds: list[int] = edge.kind.tolist()
        self.delivers = [
            kind == RouteKind.FORWARD and self._ours[self.port_place[q]]
            for kind, q in zip(kinds, self.edge_port, strict=True)
        ]
        self.leaves = [kind in (RouteKind.CLIENT, RouteKind.STREAM) for kind in kinds]
        self.place_edges = [tuple(program.place_edges.of(p)) for p in range(len(self.node))]
        self.loop_edges = [tuple(program.loop_edges.of(at)) for at in loops]
        self.back_edges = [tuple(program.back_edges.of(at)) for at in loops]

        self.partition: list[int] = walk.partition.tolist()
        self.gate: list[int] = walk.gate.tolist()
        self.open = [bool(flag) for flag in walk.open.tolist()]
        self.may_end = [bool(flag) for flag in walk.may_end.tolist()]
        self.place_of: list[list[int]] = program.place_of.tolist()
        self.places_of_walk = [tuple(program.walk_places.of(w)) for w in walks]
        self.loops_of_walk = [tuple(program.walk_loops.of(w)) for w in walks]
        self.nodes_in = [tuple(self.node[p] for p in places) for places in self.places_of_walk]
        self.all_places = [self._places(places) for places in self.places_of_walk]
        self.elsewhere = [
            self._places(p for p in places if not self._ours[p]) for places in self.places_of_walk
        ]
        self.next = [
            NONE if after == NONE or self.elsewhere[after] else after for after in walk.next.tolist()
        ]
        self.leads = [after != NONE for after in walk.next.tolist()]
        self.initial = [
            self._ports(q for p in places for q in ports[p] if port.outside[q] and not stream[q])
            for places in self.places_of_walk
        ]
        self.ready_nodes = [tuple(self.node[p] for p in program.ready.of(w) if self._ours[p]) for w in walks]
        self.nodes_of = [0] * len(program.partitions)
        self.partition_of_node = [NONE] * len(program.nodes)
        for w, nodes in enumerate(self.nodes_in):
            for node in nodes:
                self.nodes_of[self.partition[w]] |= self.node_bit[node]
                self.partition_of_node[node] = self.partition[w]

    def _set_loops(self, program: Program) -> None:
        loop, loops = program.loop, range(len(program.loops))
        self.loop: list[int] = program.place.loop.tolist()
        self.parent: list[int] = loop.parent.tolist()
        self.loop_walk: list[int] = loop.walk.tolist()
        self.counts_tokens = [bool(flag) for flag in loop.tokens.tolist()]
        first: list[int] = program.walk_loops.start.tolist()
        self.loop_bit = [1 << at - first[w] for at, w in enumerate(self.loop_walk)]
        self.places = [
            tuple(range(first, last))
            for first, last in zip(loop.first.tolist(), loop.last.tolist(), strict=True)
        ]
        for at in loops:
            ours = [self._ours[p] for p in self.places[at]]
            if any(ours) and not all(ours):
                names = ", ".join(program.nodes[self.node[p]] for p in self.places[at] if not self._ours[p])
                raise GraphError(
                    f"Loop {program.loops[at]!r} has some of its nodes here, but not {names}; put them all "
                    "on the same ranks"
                )
        self.only_place = [
            places[0] if len(places) == 1 and self.loop[places[0]] == at else NONE
            for at, places in enumerate(self.places)
        ]
        self.body = [self._places(places) for places in self.places]
        around = [self._around(at) for at in loops]
        self.inner = [tuple(other for other in loops if at in around[other][1:]) for at in loops]
        self.within = [sum(self.loop_bit[other] for other in (at, *self.inner[at])) for at in loops]
        scopes = program.port.scope.tolist()
        made = [around[scope] if scope != NONE else () for scope in scopes]
        body_ports = [[q for p in places for q in program.place_ports.of(p)] for places in self.places]
        self.renewed = [self._ports(q for q in body_ports[at] if at in made[q]) for at in loops]

    def _around(self, loop: int) -> tuple[int, ...]:
        """``loop`` and the Loops around it, innermost first."""
        chain: list[int] = []
        while loop != NONE:
            chain.append(loop)
            loop = self.parent[loop]
        return tuple(chain)

    def _places(self, places: Iterable[int]) -> int:
        return sum(self.place_bit[p] for p in places)

    def _ports(self, ports: Iterable[int]) -> int:
        return sum(self.port_bit[q] for q in ports)
