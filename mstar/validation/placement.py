"""Placement: which nodes run on which ranks, which ranks run in lockstep, and what that rules out.

A cell is a set of ranks that groups of more than one rank join, directly or through each other. Its lowest
rank decides every step of it, so that groups over the same ranks have one leader and one sequence of steps:
with two of them, ranks could wait for each other.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from mstar.config.schema import NodeGroup

__all__ = [
    "Cell",
    "Group",
    "IncompletePlacement",
    "NodeFacts",
    "Overlap",
    "Placement",
    "PlacementInvalid",
    "SequenceParallelUnsupported",
    "SizeContradiction",
    "UnknownName",
    "place",
]


class PlacementInvalid(ValueError):
    """A deployment places nodes or ranks in a way that cannot run; the message names path and value."""


class UnknownName(PlacementInvalid):
    """A group names a node, a walk or a rank that does not exist."""


class Overlap(PlacementInvalid):
    """Two groups run the same node in the same walk, or a group names something twice."""


class IncompletePlacement(PlacementInvalid):
    """A node, one of its walks, or a rank is in no group."""


class SizeContradiction(PlacementInvalid):
    """Sizes of a deployment do not fit together."""


class SequenceParallelUnsupported(PlacementInvalid):
    """A node that knows no sequence parallelism is in a group that asks for it."""


class NodeFacts(NamedTuple):
    """What a model says about a node: the walks that run it, and whether ranks can split its sequences."""

    walks: tuple[str, ...]
    sequence_parallel: bool = False


class Group(NamedTuple):
    """A group in full: nothing is left to defaults. ``instances`` are its replicas, each its ranks in order.

    Within an instance of tp_size * sp_size ranks, neighbours split the layers and strides of tp_size split
    the sequence: rank i of it has tensor place i % tp_size and sequence place i // tp_size.
    """

    path: str
    nodes: tuple[str, ...]
    walks: tuple[str, ...]
    tp_size: int
    sp_size: int
    instances: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group."""
        return tuple(rank for instance in self.instances for rank in instance)

    @property
    def size(self) -> int:
        """Ranks that run in lockstep, shards of a head dimension at most."""
        return self.tp_size * self.sp_size


class Cell(NamedTuple):
    """Ranks that run one sequence of steps, ascending; ``leader`` decides them."""

    leader: int
    ranks: tuple[int, ...]


class Placement(NamedTuple):
    """Groups in the order of the deployment, cells by leader, and the nodes that are chunked nowhere.

    ``no_chunking`` maps such a node to the reason, as ``ChunkingManagement.set_budgets`` takes it.
    """

    groups: tuple[Group, ...]
    cells: tuple[Cell, ...]
    no_chunking: dict[str, str]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending: 0 to n - 1."""
        return tuple(sorted(rank for cell in self.cells for rank in cell.ranks))

    def cell_of(self, rank: int) -> Cell:
        """The cell that ``rank`` is part of. Raises KeyError."""
        for cell in self.cells:
            if rank in cell.ranks:
                return cell
        raise KeyError(rank)

    def group_of(self, node: str, walk: str) -> Group:
        """The group that runs ``node`` in ``walk``. Raises KeyError."""
        for group in self.groups:
            if node in group.nodes and walk in group.walks:
                return group
        raise KeyError((node, walk))

    def deciders(self, node: str, walk: str) -> tuple[int, ...]:
        """By replica the rank that decides the steps of ``node`` in ``walk``.

        That is the leader of the cell for a group of several ranks, and the rank itself for a lone one.
        """
        group = self.group_of(node, walk)
        if group.size == 1:
            return group.ranks
        return tuple(self.cell_of(instance[0]).leader for instance in group.instances)


def place(
    node_groups: Sequence[NodeGroup],
    nodes: Mapping[str, NodeFacts],
    *,
    tensor_parallel_size: int = 1,
    devices: int | None = None,
) -> Placement:
    """The placement that a deployment means for a model with these ``nodes``.

    Without groups, one holds every node on ranks 0 to tensor_parallel_size - 1. A group without nodes has
    those that no other names, one without ranks the lowest ones that no group names, one without tp_size
    that of the deployment; ``devices`` bounds the ranks where each needs one of its own. A group of more
    ranks than tp_size * sp_size has replicas. Nodes in a group with sp_size > 1 are not chunked, which is
    no error. Raises UnknownName, Overlap, IncompletePlacement, SizeContradiction and
    SequenceParallelUnsupported.
    """
    asked = tuple(node_groups) or (NodeGroup(),)
    names = _names(asked, nodes)
    walks = [_walks(f"node_groups[{at}]", group, names[at], nodes) for at, group in enumerate(asked)]
    _check_cover(names, walks, nodes)
    sizes = [_tp_size(f"node_groups[{at}]", g, tensor_parallel_size) for at, g in enumerate(asked)]
    ranks = _ranks(asked, sizes, devices)
    groups = tuple(
        Group(
            f"node_groups[{at}]",
            names[at],
            walks[at],
            sizes[at],
            group.sp_size,
            tuple(
                ranks[at][first : first + sizes[at] * group.sp_size]
                for first in range(0, len(ranks[at]), sizes[at] * group.sp_size)
            ),
        )
        for at, group in enumerate(asked)
    )
    return Placement(groups, _cells(groups), _no_chunking(groups, nodes))


def _names(asked: Sequence[NodeGroup], nodes: Mapping[str, NodeFacts]) -> list[tuple[str, ...]]:
    named = {name for group in asked for name in group.node_names}
    for at, group in enumerate(asked):
        for place, name in enumerate(group.node_names):
            if name not in nodes:
                raise UnknownName(
                    f"node_groups[{at}].node_names[{place}] is {name!r}, which is no node of the model; "
                    f"{_allowed(name, nodes)}"
                )
        _check_once(f"node_groups[{at}].node_names", group.node_names)
    rest = tuple(name for name in nodes if name not in named)
    without = [at for at, group in enumerate(asked) if not group.node_names]
    if len(without) > 1:
        raise Overlap(
            f"node_groups[{without[0]}] and node_groups[{without[1]}] both have no node_names, so both would "
            "run the nodes that no other group names; name the nodes of one"
        )
    if without and not rest:
        raise IncompletePlacement(
            f"node_groups[{without[0]}] has no node_names, but the other groups name every node "
            f"({', '.join(nodes)}), so it would run nothing; leave the group out"
        )
    return [group.node_names or rest for group in asked]


def _walks(
    path: str, group: NodeGroup, names: Sequence[str], nodes: Mapping[str, NodeFacts]
) -> tuple[str, ...]:
    known = tuple(dict.fromkeys(walk for name in names for walk in nodes[name].walks))
    for at, walk in enumerate(group.graph_walks):
        if walk not in known:
            raise UnknownName(
                f"{path}.graph_walks[{at}] is {walk!r}, which is no walk of {', '.join(names)}; "
                f"{_allowed(walk, known)}"
            )
    _check_once(f"{path}.graph_walks", group.graph_walks)
    return group.graph_walks or known


def _check_cover(
    names: Sequence[tuple[str, ...]], walks: Sequence[tuple[str, ...]], nodes: Mapping[str, NodeFacts]
) -> None:
    for node, facts in nodes.items():
        for walk in facts.walks:
            found = [at for at in range(len(names)) if node in names[at] and walk in walks[at]]
            if not found:
                raise IncompletePlacement(
                    f"no group of node_groups runs node {node} in walk {walk}; name it in one of them"
                )
            if len(found) > 1:
                raise Overlap(
                    f"node_groups[{found[0]}] and node_groups[{found[1]}] both run node {node} in walk "
                    f"{walk}; name it in one of them, or give them different graph_walks"
                )


def _tp_size(path: str, group: NodeGroup, of_deployment: int) -> int:
    if group.tp_size is None:
        return of_deployment
    if of_deployment not in (1, group.tp_size):
        raise SizeContradiction(
            f"{path}.tp_size is {group.tp_size}, but tensor_parallel_size is {of_deployment}; leave one out, "
            "or give both the same size"
        )
    return group.tp_size


def _ranks(asked: Sequence[NodeGroup], sizes: Sequence[int], devices: int | None) -> list[tuple[int, ...]]:
    for at, group in enumerate(asked):
        path, size = f"node_groups[{at}]", sizes[at] * group.sp_size
        for place, rank in enumerate(group.ranks):
            if rank < 0 or (devices is not None and rank >= devices):
                allowed = "of at least 0" if devices is None else f"from 0 to {devices - 1}"
                raise UnknownName(f"{path}.ranks[{place}] is {rank}; allowed is a rank {allowed}")
        _check_once(f"{path}.ranks", group.ranks)
        if len(group.ranks) % size:
            raise SizeContradiction(
                f"{path}.ranks is {list(group.ranks)}, but its tp_size {sizes[at]} and sp_size "
                f"{group.sp_size} take {size} ranks; allowed are {size}, or a multiple for replicas"
            )
    taken = {rank for group in asked for rank in group.ranks}
    found: list[tuple[int, ...]] = []
    for group, tp_size in zip(asked, sizes, strict=True):
        ranks = group.ranks
        if not ranks:
            free = (rank for rank in range(len(taken) + tp_size * group.sp_size) if rank not in taken)
            ranks = tuple(next(free) for _ in range(tp_size * group.sp_size))
            taken.update(ranks)
        found.append(ranks)
    count = max(taken) + 1
    if devices is not None and count > devices:
        raise SizeContradiction(
            f"the deployment takes {count} ranks and there are {devices} devices; lower tensor_parallel_size "
            "or the sizes of node_groups, or give groups the same ranks"
        )
    idle = next((rank for rank in range(count) if rank not in taken), None)
    if idle is not None:
        raise IncompletePlacement(
            f"rank {idle} is in no group of node_groups, though rank {count - 1} is; ranks are counted from "
            "0 without a gap"
        )
    return found


def _cells(groups: Sequence[Group]) -> tuple[Cell, ...]:
    """Connected components of the ranks; an instance of one rank joins nothing."""
    lowest = {rank: rank for group in groups for rank in group.ranks}
    for group in groups:
        for instance in group.instances:
            joined = {lowest[rank] for rank in instance}
            leader = min(joined)
            lowest = {rank: leader if at in joined else at for rank, at in lowest.items()}
    members: dict[int, list[int]] = {}
    for rank in sorted(lowest):
        members.setdefault(lowest[rank], []).append(rank)
    return tuple(Cell(leader, tuple(ranks)) for leader, ranks in sorted(members.items()))


def _no_chunking(groups: Sequence[Group], nodes: Mapping[str, NodeFacts]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for group in groups:
        if group.sp_size == 1:
            continue
        for node in group.nodes:
            if not nodes[node].sequence_parallel:
                able = [name for name, facts in nodes.items() if facts.sequence_parallel]
                raise SequenceParallelUnsupported(
                    f"{group.path}.sp_size is {group.sp_size}, but node {node} does not support sequence "
                    f"parallelism; allowed is 1 (nodes of this model that do: {', '.join(able) or 'none'})"
                )
            reasons.setdefault(
                node,
                f"{group.path} runs it with sp_size {group.sp_size}, and chunked prefill does not support "
                "sequence parallelism",
            )
    return reasons


def _check_once(path: str, values: Sequence[object]) -> None:
    for at, value in enumerate(values):
        if value in values[:at]:
            raise Overlap(f"{path}[{at}] is {value!r}, which stands there twice; name it once")


def _allowed(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"allowed are {', '.join(known)}" + (f". Did you mean {close[0]}?" if close else "")
