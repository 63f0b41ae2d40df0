"""Random walks, and an account of every value that moves on their edges.

The account knows the structure of a walk from its declaration alone: how often each node runs, and of
which iteration each value that a node reads has to be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod
from random import Random

from mstar.graph.model import ModelGraph
from mstar.graph.nodes import CLIENT, GraphEdge, GraphNode, Loop, Parallel, Section, Sequential
from mstar.graph.runtime import Ended
from tests.graph.drive import Drive
from tests.graph.models import one_walk

DEPTH = 4
"""How deep sections lie in each other."""


@dataclass
class Spot:
    """A node to be: where it lies, and the edges it has been given."""

    name: str
    loops: tuple[str, ...]
    branches: tuple[tuple[int, int], ...]
    inputs: list[str] = field(default_factory=list)
    outputs: list[GraphEdge] = field(default_factory=list)


@dataclass
class Wire:
    """An edge: it leaves when the Loop ``exit`` ends, or with each run, within the Loops ``around``."""

    edge: GraphEdge
    source: Spot
    target: Spot | None
    exit: str
    around: tuple[str, ...]
    back: bool


class RandomWalk:
    """A walk of up to about twenty nodes, drawn with ``rng``: Sequentials, Parallels, Loops in each other."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.spots: list[Spot] = []
        self.wires: list[Wire] = []
        self.caps: dict[str, int] = {}
        self.outside: list[str] = []
        self._names = count()
        self._shape = self._draw(DEPTH, (), ())
        for at, spot in enumerate(self.spots):
            self._feed(at, spot)
            if rng.random() < 0.3:
                edge = GraphEdge(f"seen{next(self._names)}", CLIENT)
                self._wire(spot, None, edge, "", spot.loops, back=False)
        exits = [wire for wire in self.wires if wire.exit]
        self.graph: ModelGraph = one_walk(self._build(self._shape, exits), *self.outside)

    # ---- drawing -----------------------------------------------------------------------------

    def _draw(self, depth: int, loops: tuple[str, ...], branches: tuple[tuple[int, int], ...]) -> object:
        """A tree of names and (kind, name, parts)."""
        kind = self.rng.choice(("node", "sequential", "parallel", "loop", "loop")) if depth else "node"
        kind = "sequential" if depth == DEPTH else kind
        if kind == "node":
            spot = Spot(f"n{len(self.spots)}", loops, branches)
            self.spots.append(spot)
            return spot
        if kind == "loop":
            name = f"loop{len(self.caps)}"
            self.caps[name] = self.rng.randint(1, 3)
            return kind, name, [self._draw(depth - 1, (*loops, name), branches)]
        number = next(self._names)
        parts = [
            self._draw(depth - 1, loops, (*branches, (number, part)) if kind == "parallel" else branches)
            for part in range(self.rng.randint(1, 3))
        ]
        return kind, "", parts

    def _feed(self, at: int, spot: Spot) -> None:
        """Give a node one to three inputs: from nodes before it, from outside, some also carried back."""
        for _ in range(self.rng.randint(1, 3)):
            port = f"in{next(self._names)}"
            spot.inputs.append(port)
            before = [other for other in self.spots[:at] if _may_meet(other, spot)]
            around: tuple[str, ...] = ()
            if before and self.rng.random() < 0.8:
                source = self.rng.choice(before)
                around = _shared(source.loops, spot.loops)
                leaving = source.loops[len(around)] if len(source.loops) > len(around) else ""
                self._wire(
                    source, spot, GraphEdge(f"out{port}", spot.name, port), leaving, around, back=False
                )
            else:
                self.outside.append(port)
            deeper = spot.loops[len(around) :]
            if deeper and self.rng.random() < 0.5:
                self._carry(at, spot, port, self.rng.choice(deeper))

    def _carry(self, at: int, spot: Spot, port: str, loop: str) -> None:
        """Carry a value of a node of ``loop``'s body, ``spot`` or a later one, back to ``port``."""
        later = [other for other in self.spots[at:] if loop in other.loops and _may_meet(other, spot)]
        # An edge goes back in the innermost Loop that its ends share.
        around = spot.loops[: spot.loops.index(loop) + 1]
        later = [other for other in later if _shared(other.loops, spot.loops) == around]
        if later:
            source = self.rng.choice(later)
            leaving = source.loops[len(around)] if len(source.loops) > len(around) else ""
            self._wire(source, spot, GraphEdge(f"back{port}", spot.name, port), leaving, around, back=True)

    def _wire(
        self,
        source: Spot,
        target: Spot | None,
        edge: GraphEdge,
        leaving: str,
        around: tuple[str, ...],
        back: bool,
    ) -> None:
        if leaving:
            edge = replace(edge, source=source.name)
        else:
            source.outputs.append(edge)
        self.wires.append(Wire(edge, source, target, leaving, around, back))

    def _build(self, shape: object, exits: list[Wire]) -> Section:
        if isinstance(shape, Spot):
            return GraphNode(shape.name, tuple(shape.inputs), tuple(shape.outputs))
        kind, name, parts = shape  # type: ignore[misc]
        sections = tuple(self._build(part, exits) for part in parts)
        if kind == "loop":
            leaving = tuple(wire.edge for wire in exits if wire.exit == name)
            return Loop(name, sections[0], cap=name, outputs=leaving)
        return Parallel(sections) if kind == "parallel" else Sequential(sections)

    # ---- what has to happen ------------------------------------------------------------------

    def runs(self, loops: tuple[str, ...]) -> int:
        """How often what lies in these Loops runs."""
        return prod(self.caps[loop] for loop in loops)

    def times(self, wire: Wire) -> int:
        """How often a wire carries a value."""
        if not wire.back:
            return self.runs(wire.around)
        *outer, loop = wire.around
        return self.runs(tuple(outer)) * (self.caps[loop] - 1)

    def iteration(self, loops: tuple[str, ...], run: int) -> tuple[int, ...]:
        """The iteration of each Loop that the run number ``run`` of what lies in them is part of."""
        places = []
        for loop in reversed(loops):
            run, place = divmod(run, self.caps[loop])
            places.append(place)
        return tuple(reversed(places))


def _shared(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


def _may_meet(a: Spot, b: Spot) -> bool:
    branch = dict(b.branches)
    return all(branch.get(number, part) == part for number, part in a.branches)


class Account:
    """Runs a RandomWalk in an order that ``rng`` draws, and checks every value that a node reads."""

    def __init__(self, walk: RandomWalk, rng: Random) -> None:
        self.walk, self.rng = walk, rng
        self.drive = Drive(walk.graph, **walk.caps)
        self.ran: Counter[str] = Counter()
        self.carried: Counter[str] = Counter()
        self.value: dict[tuple[str, str], tuple[int, ...]] = {}
        self._wire = {
            f"{w.source.name}.{w.edge.name} -> {w.edge.to}" + (f".{w.edge.port}" if w.target else ""): w
            for w in walk.wires
        }
        self._spot = {spot.name: spot for spot in walk.spots}

    def run(self) -> None:
        """Until the walk ends. Raises AssertionError."""
        ready, flying = self.drive.admit("run"), []
        for _ in range(10_000):
            if ready and (not flying or self.rng.random() < 0.5):
                node = ready.pop(self.rng.randrange(len(ready)))
                self.read(self._spot[node])
                self.drive.start(node)
                flying.append(node)
                continue
            node = flying.pop(self.rng.randrange(len(flying)))
            self.ran[node] += 1
            routed = self.drive.complete(node)
            for name in self.drive.edges(routed):
                self.move(self._wire[name])
            ready += self.drive.ready(routed)
            if routed.ended is not Ended.NOTHING:
                assert routed.ended is Ended.PARTITION
                assert not ready
                assert not flying
                return
        raise AssertionError("the walk does not end")

    def move(self, wire: Wire) -> None:
        """A value left, of the last run of its source: of the iteration of the Loops that it left in."""
        run = self.ran[wire.source.name] - 1
        name = str(wire.edge) + wire.source.name
        at = self.walk.iteration(wire.source.loops, run)[: len(wire.around)]
        self.carried[name] += 1
        if wire.target is not None:
            self.value[wire.source.name, wire.edge.name] = at

    def read(self, spot: Spot) -> None:
        """A node is about to run: what it reads is of its own iteration, or carried from the one before."""
        now = self.walk.iteration(spot.loops, self.ran[spot.name])
        for port in spot.inputs:
            into = [wire for wire in self.walk.wires if wire.target is spot and wire.edge.port == port]
            back = next((wire for wire in into if wire.back), None)
            first = next((wire for wire in into if not wire.back), None)
            depth = len(back.around) if back else 0
            if back is not None and now[depth - 1] > 0:
                due = (*now[: depth - 1], now[depth - 1] - 1)
                assert self.value[back.source.name, back.edge.name] == due
            elif first is not None:
                assert self.value[first.source.name, first.edge.name] == now[: len(first.around)]

    def settle(self) -> None:
        """Every node ran, and every wire carried a value, as often as the declaration says."""
        for spot in self.walk.spots:
            assert self.ran[spot.name] == self.walk.runs(spot.loops), spot.name
        for wire in self.walk.wires:
            assert self.carried[str(wire.edge) + wire.source.name] == self.walk.times(wire), str(wire.edge)
