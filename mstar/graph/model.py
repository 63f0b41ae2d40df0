"""ModelGraph: everything a model declares about its graph, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mstar.graph.errors import GraphError
from mstar.graph.layout import RouteKind, WalkLayout
from mstar.graph.nodes import Section, StreamingGraphEdge, check_name, loops_of
from mstar.graph.policy import NO_CHUNKING, ChunkingPolicies, ChunkingPolicy
from mstar.graph.schedule import WalkOrder

__all__ = ["ModelGraph"]


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """Walks by name, the partitions that order them, and what may be combined and chunked.

    ``partitions`` advance independently of each other; each walk, and each node, is part of one.
    ``combined`` names a label for steps in which rows of several walks of one node run together.
    ``chunking_policies`` are by (node, walk) or (node, label). Raises GraphError where the parts contradict
    each other: unknown names, an input that nobody produces, a walk of no partition.
    """

    walks: Mapping[str, Section]
    partitions: Mapping[str, WalkOrder]
    combined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    chunking_policies: ChunkingPolicies = field(default_factory=dict)
    layouts: Mapping[str, WalkLayout] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("walks", "partitions", "combined", "chunking_policies"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if not self.walks:
            raise GraphError("a model without walks runs nothing; declare at least one")
        for name in (*self.walks, *self.combined):
            check_name("walk", name)
        layouts = {name: WalkLayout(name, section) for name, section in self.walks.items()}
        object.__setattr__(self, "layouts", MappingProxyType(layouts))
        self._check_loops()
        self._check_partitions()
        streams = self._check_streams()
        for partition, order in self.partitions.items():
            for walk in order.walks:
                self._check_inputs(partition, order, layouts[walk], streams)
        self._check_combined()
        self._check_policies()

    # ---- questions ---------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes, in order of first mention."""
        return tuple(dict.fromkeys(name for layout in self.layouts.values() for name in layout.place_of))

    def walks_of(self, node: str) -> tuple[str, ...]:
        """The walks that ``node`` is part of."""
        return tuple(name for name, layout in self.layouts.items() if node in layout.place_of)

    def combined_walk_of(self, node: str, walk: str) -> str | None:
        """The label of the steps that ``walk`` shares with other walks on ``node``, if any."""
        if node not in self.layouts[walk].place_of:
            return None
        for label, walks in self.combined.items():
            if walk in walks and all(node in self.layouts[other].place_of for other in walks):
                return label
        return None

    def policy(self, node: str, walk: str) -> ChunkingPolicy:
        """The chunking policy of ``node`` in ``walk``, NO_CHUNKING where none is declared."""
        return self.chunking_policies.get((node, walk), NO_CHUNKING)

    def partition_of(self, walk: str) -> str:
        """The partition that ``walk`` is part of. Raises KeyError."""
        return next(name for name, order in self.partitions.items() if walk in order.walks)

    # ---- checks ------------------------------------------------------------------------------

    def _check_loops(self) -> None:
        seen: dict[str, str] = {}
        for walk, section in self.walks.items():
            for loop in loops_of(section):
                other = seen.setdefault(loop.name, walk)
                if other != walk:
                    raise GraphError(
                        f"walks {other!r} and {walk!r} both have a Loop {loop.name!r}; "
                        "give each a name of its own"
                    )

    def _check_partitions(self) -> None:
        owner: dict[str, str] = {}
        node_owner: dict[str, str] = {}
        for partition, order in self.partitions.items():
            check_name("partition", partition)
            for walk in order.walks:
                if walk not in self.walks:
                    raise _unknown(f"partition {partition!r} names walk", walk, self.walks)
                if owner.setdefault(walk, partition) != partition:
                    raise GraphError(
                        f"walk {walk!r} is part of {owner[walk]!r} and {partition!r}; name it in one of them"
                    )
                for node in self.layouts[walk].place_of:
                    if node_owner.setdefault(node, partition) != partition:
                        raise GraphError(
                            f"node {node!r} is part of {node_owner[node]!r} and {partition!r}; partitions "
                            "advance independently, so a node has one"
                        )
        for walk in self.walks:
            if walk not in owner:
                raise GraphError(f"walk {walk!r} is part of no partition; name it in a walk order")

    def _check_streams(self) -> dict[tuple[str, str, str], str]:
        """(walk, node, input) of every input that a stream feeds -> what feeds it."""
        fed: dict[tuple[str, str, str], str] = {}
        for walk, edge, what in self._streams():
            layout = self.layouts.get(edge.walk)
            if layout is None:
                raise _unknown(f"{what} names walk", edge.walk, self.walks)
            if self.partition_of(edge.walk) == self.partition_of(walk):
                raise GraphError(
                    f"{what} stays within its partition; a stream joins two partitions, use a GraphEdge here"
                )
            place = layout.place_of.get(edge.to)
            if place is None:
                raise _unknown(f"{what} goes, in walk {edge.walk!r}, to node", edge.to, layout.place_of)
            if edge.port not in layout.places[place].node.inputs:
                known = layout.places[place].node.inputs
                raise _unknown(f"{what} feeds, in walk {edge.walk!r}, input", edge.port, known)
            if (place, edge.port) not in layout.outside:
                raise GraphError(f"{what} feeds an input that walk {edge.walk!r} feeds itself; leave one out")
            fed[edge.walk, edge.to, edge.port] = what
        for walk, layout in self.layouts.items():
            for route in layout.routes:
                key = walk, route.edge.to, route.edge.port
                if route.kind is RouteKind.BACK and key in fed:
                    raise GraphError(f"{fed[key]} feeds an input that a Loop carries back; leave one out")
        return fed

    def _streams(self) -> Iterator[tuple[str, StreamingGraphEdge, str]]:
        for walk, layout in self.layouts.items():
            for route in layout.routes:
                if isinstance(route.edge, StreamingGraphEdge):
                    node = layout.places[route.source].node.name
                    yield walk, route.edge, f"walk {walk!r}: the streaming edge {node}.{route.edge}"

    def _check_inputs(
        self,
        partition: str,
        order: WalkOrder,
        layout: WalkLayout,
        streams: Mapping[tuple[str, str, str], str],
    ) -> None:
        """Every input that the walk does not feed itself comes from the request, a stream, or before."""
        walk = layout.name
        given = set(order.inputs.get(walk, ()))
        before = order.before(walk)
        kept = [self.layouts[other].outputs_to_next() for other in before]
        left = set(given)
        for place, name in layout.outside:
            node = layout.places[place].node.name
            left.discard(name)
            stream = streams.get((walk, node, name))
            if stream is not None and name in given:
                raise GraphError(f"{stream} feeds an input that comes with the request; leave one out")
            if name in given or stream is not None:
                continue
            for other, names in zip(before, kept, strict=True):
                if name not in names:
                    raise GraphError(
                        f"nobody produces the input {name!r} of node {node!r} when walk {walk!r} follows "
                        f"{other!r}; send an output of that name from there to NEXT_WALK, or list it in the "
                        f"inputs of {walk!r}"
                    )
            if walk in order.first or not before:
                raise GraphError(
                    f"nobody produces the input {name!r} of node {node!r} in walk {walk!r}, which partition "
                    f"{partition!r} may begin with; feed it by an edge or list it in the inputs of {walk!r}"
                )
        if left:
            raise _unknown(
                f"partition {partition!r} gives walk {walk!r} the input",
                sorted(left)[0],
                [name for _, name in layout.outside],
            )
        taken = {
            name
            for step in order.transitions
            if step.walk == walk
            for _, name in self.layouts[step.next].outside
        }
        for name in sorted(layout.outputs_to_next() - taken):
            raise GraphError(
                f"walk {walk!r} keeps the output {name!r} for the next walk, but none that follows has an "
                "input of that name; leave the edge out or name it as the input is"
            )

    def _check_combined(self) -> None:
        for label, walks in self.combined.items():
            if label in self.walks:
                raise GraphError(f"{label!r} names a walk and a combined walk; give them two names")
            for walk in walks:
                if walk not in self.walks:
                    raise _unknown(f"combined walk {label!r} names walk", walk, self.walks)
            if len(set(walks)) < 2 or len(set(walks)) != len(walks):
                raise GraphError(
                    f"combined walk {label!r} is of {', '.join(walks) or 'none'}; name two or more, once each"
                )
            shared = set.intersection(*(set(self.layouts[walk].place_of) for walk in walks))
            if not shared:
                raise GraphError(
                    f"the walks of combined walk {label!r} ({', '.join(walks)}) have no node in common, so "
                    "there is no step that they could share"
                )
            for node in sorted(shared):
                for walk in walks:
                    other = self.combined_walk_of(node, walk)
                    if other != label:
                        raise GraphError(
                            f"on node {node!r}, walk {walk!r} is part of the combined walks {other!r} and "
                            f"{label!r}; a row runs in one kind of step, so leave one out"
                        )

    def _check_policies(self) -> None:
        for node, walk in self.chunking_policies:
            if node not in self.nodes:
                raise _unknown("a chunking policy names node", node, self.nodes)
            known = list(self.walks_of(node))
            known += [label for label in self.combined if self._shares(node, label)]
            if walk not in known:
                raise _unknown(f"a chunking policy of node {node!r} names walk", walk, known)

    def _shares(self, node: str, label: str) -> bool:
        return all(node in self.layouts[walk].place_of for walk in self.combined[label])


def _unknown(what: str, name: str, known: Iterable[str]) -> GraphError:
    return GraphError(f"{what} {name!r}, which does not exist; there are {', '.join(known) or 'none'}")
