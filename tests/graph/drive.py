"""Driving one slot of a GraphRuntime by names."""

from __future__ import annotations

from mstar.graph.compile import compile_graph
from mstar.graph.model import ModelGraph
from mstar.graph.program import NONE, Program
from mstar.graph.runtime import GraphRuntime, Routed


class Drive:
    """Slot 0 of a runtime over ``graph``; names in, names out."""

    def __init__(
        self, graph: ModelGraph, slot: int = 0, here: tuple[str, ...] | None = None, **caps: int
    ) -> None:
        self.program: Program = compile_graph(graph)
        nodes = None if here is None else [self.program.node_id(name) for name in here]
        self.runtime = GraphRuntime(self.program, slot + 1, nodes)
        self.slot = slot
        self.cap(**caps)

    def cap(self, **caps: int) -> None:
        """Set caps; a dot in a cap's name is written as two underscores."""
        named = {name.replace("__", "."): value for name, value in caps.items()}
        self.runtime.set_loop_caps(self.slot, self.program.caps_of(named))

    def admit(self, walk: str, *ports: str) -> list[str]:
        given = [self.port(port) for port in ports] if ports else None
        ready = self.runtime.admit(self.slot, self.program.walk_id(walk), given)
        return [self.program.nodes[node] for node in ready]

    def port(self, name: str) -> int:
        """The port written 'walk:node.input'."""
        walk, _, rest = name.partition(":")
        node, _, port = rest.partition(".")
        return self.program.port_id(walk, node, port)

    def deliver(self, port: str) -> str | None:
        node = self.runtime.deliver(self.slot, self.port(port))
        return None if node == NONE else self.program.nodes[node]

    def wants(self, port: str) -> bool:
        return self.runtime.wants(self.slot, self.port(port))

    def start(self, *nodes: str) -> None:
        for node in nodes:
            self.runtime.start(self.slot, self.program.node_id(node))

    def complete(
        self, node: str, outputs: str | None = None, stride: int = 1, stop: str | int = NONE
    ) -> Routed:
        made = None if outputs is None else [self.program.output_id(name) for name in outputs.split()]
        loop = self.program.loop_id(stop) if isinstance(stop, str) else stop
        return self.runtime.complete(self.slot, self.program.node_id(node), made, stride=stride, stop=loop)

    def run(self, node: str, stride: int = 1, stop: str | int = NONE) -> Routed:
        """Start it and complete it."""
        self.start(node)
        return self.complete(node, stride=stride, stop=stop)

    def edges(self, routed: Routed) -> list[str]:
        """The edges that left, without their walk."""
        return [self.program.edge_names[edge].partition(": ")[2] for edge in routed.edges]

    def ready(self, routed: Routed) -> list[str]:
        return [self.program.nodes[node] for node in routed.ready]

    def counter(self, loop: str) -> int:
        return int(self.runtime.counter[self.program.loop_id(loop), self.slot])
