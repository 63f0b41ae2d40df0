"""Which nodes run where, which ranks are one cell, and what a deployment is refused for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.config.schema import NodeGroup
from mstar.engine.chunking import ChunkingManagement, ChunkingPolicy
from mstar.validation.placement import (
    Cell,
    IncompletePlacement,
    NodeFacts,
    Overlap,
    PlacementInvalid,
    SequenceParallelUnsupported,
    SizeContradiction,
    UnknownName,
    place,
)

NODES = {
    "vision": NodeFacts(("prefill",), sequence_parallel=True),
    "llm": NodeFacts(("prefill", "decode")),
    "dit": NodeFacts(("decode",), sequence_parallel=True),
}
ONE = {"llm": NODES["llm"]}


def group(*names: str, ranks: tuple[int, ...] = (), **sizes: Any) -> NodeGroup:
    return NodeGroup(names, ranks, **sizes)


def refused(kind: type[PlacementInvalid], *groups: NodeGroup, **settings: Any) -> str:
    with pytest.raises(kind) as caught:
        place(groups, NODES, **settings)
    assert caught.type is kind
    return str(caught.value)


def test_without_groups_one_group_holds_every_node_on_the_first_ranks() -> None:
    found = place((), NODES, tensor_parallel_size=3)
    assert [one.nodes for one in found.groups] == [("vision", "llm", "dit")]
    assert found.groups[0].walks == ("prefill", "decode")
    assert found.ranks == (0, 1, 2)
    assert found.cells == (Cell(0, (0, 1, 2)),)
    assert found.no_chunking == {}
    assert place((), NODES).cells == (Cell(0, (0,)),)


def test_what_a_group_leaves_out_is_filled_in() -> None:
    found = place((group("llm", ranks=(2, 3)), group()), NODES, tensor_parallel_size=2)
    assert [one.nodes for one in found.groups] == [("llm",), ("vision", "dit")]
    assert [one.ranks for one in found.groups] == [(2, 3), (0, 1)]
    assert found.cells == (Cell(0, (0, 1)), Cell(2, (2, 3)))


def test_groups_that_share_a_rank_are_one_cell_with_the_lowest_rank_in_the_lead() -> None:
    groups = (
        group("llm", ranks=(3, 2), tp_size=2),
        group("dit", ranks=(1, 2), tp_size=2),
        group("vision", ranks=(0,)),
    )
    found = place(groups, NODES)
    assert found.cells == (Cell(0, (0,)), Cell(1, (1, 2, 3)))
    assert found.deciders("llm", "decode") == (1,)
    assert found.cell_of(3).leader == 1
    assert found.groups[0].instances == ((3, 2),)


def test_a_node_on_one_rank_of_a_cell_is_decided_by_that_rank() -> None:
    found = place((group("llm", ranks=(0, 1), tp_size=2), group("vision", "dit", ranks=(1,))), NODES)
    assert found.cells == (Cell(0, (0, 1)),)
    assert found.deciders("vision", "prefill") == (1,)
    assert found.deciders("llm", "prefill") == (0,)


def test_more_ranks_than_a_group_takes_are_replicas() -> None:
    found = place((group(ranks=(0, 1, 2, 3), tp_size=2),), NODES)
    assert found.groups[0].instances == ((0, 1), (2, 3))
    assert found.cells == (Cell(0, (0, 1)), Cell(2, (2, 3)))
    assert found.deciders("llm", "decode") == (0, 2)
    lone = place((group(ranks=(0, 1)),), NODES)
    assert lone.cells == (Cell(0, (0,)), Cell(1, (1,)))
    assert lone.deciders("llm", "decode") == (0, 1)


def test_a_node_may_run_its_walks_on_different_ranks() -> None:
    groups = (
        group("llm", ranks=(0,), graph_walks=("prefill",)),
        group("llm", ranks=(1,), graph_walks=("decode",)),
        group("vision", "dit", ranks=(1,)),
    )
    found = place(groups, NODES)
    assert found.group_of("llm", "prefill").ranks == (0,)
    assert found.group_of("llm", "decode").ranks == (1,)
    with pytest.raises(KeyError):
        found.group_of("llm", "other")
    with pytest.raises(KeyError):
        found.cell_of(2)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), min_size=1, max_size=6))
def test_cells_are_the_connected_components_of_lockstep_groups(sets: list[list[int]]) -> None:
    order = {rank: at for at, rank in enumerate(sorted({rank for one in sets for rank in one}))}
    groups = [
        NodeGroup((f"n{at}",), tuple(order[rank] for rank in one), tp_size=len(one))
        for at, one in enumerate(sets)
    ]
    nodes = {f"n{at}": NodeFacts(("walk",)) for at in range(len(sets))}
    found = place(groups, nodes)
    for one in order.values():
        reached = {one}
        for _ in groups:
            reached |= {rank for g in groups if reached & set(g.ranks) for rank in g.ranks}
        cell = found.cell_of(one)
        assert cell.ranks == tuple(sorted(reached))
        assert cell.leader == min(reached)
    assert found.ranks == tuple(range(len(order)))


@pytest.mark.parametrize(
    ("kind", "groups", "message"),
    [
        (UnknownName, [group("lm"), group()], "node_groups[0].node_names[0] is 'lm'"),
        (UnknownName, [group("lm"), group()], "allowed are vision, llm, dit. Did you mean llm?"),
        (UnknownName, [group("llm", graph_walks=("prefil",)), group()], "allowed are prefill, decode. Did"),
        (
            UnknownName,
            [group("dit", graph_walks=("prefill",)), group()],
            "no walk of dit; allowed are decode",
        ),
        (Overlap, [group("llm", "llm"), group()], "node_groups[0].node_names[1] is 'llm', which stands"),
        (Overlap, [group(), group(ranks=(1,))], "node_groups[0] and node_groups[1] both have no node_names"),
        (
            Overlap,
            [group("llm"), group("llm", "dit"), group()],
            "node_groups[0] and node_groups[1] both run node llm in walk prefill",
        ),
        (Overlap, [group(ranks=(0, 0), tp_size=2)], "node_groups[0].ranks[1] is 0, which stands there twice"),
        (IncompletePlacement, [group("llm"), group("dit")], "runs node vision in walk prefill"),
        (
            IncompletePlacement,
            [group("llm", graph_walks=("prefill",)), group("vision", "dit")],
            "no group of node_groups runs node llm in walk decode",
        ),
        (IncompletePlacement, [group("llm", "dit", "vision"), group()], "it would run nothing"),
        (IncompletePlacement, [group(ranks=(1,))], "rank 0 is in no group of node_groups, though rank 1 is"),
        (SizeContradiction, [group(ranks=(0, 1, 2), tp_size=2)], "allowed are 2, or a multiple"),
        (SizeContradiction, [group(ranks=(0,), tp_size=2)], "node_groups[0].ranks is [0], but its tp_size 2"),
        (
            SequenceParallelUnsupported,
            [group(sp_size=2)],
            "node_groups[0].sp_size is 2, but node llm does not",
        ),
        (SequenceParallelUnsupported, [group(sp_size=2)], "(nodes of this model that do: vision, dit)"),
    ],
)
def test_what_cannot_run_is_refused_with_path_value_and_what_is_allowed(
    kind: type[PlacementInvalid], groups: list[NodeGroup], message: str
) -> None:
    assert message in refused(kind, *groups)


def test_the_size_of_a_group_may_repeat_that_of_the_deployment_and_not_contradict_it() -> None:
    assert place((group(tp_size=2),), NODES, tensor_parallel_size=2).ranks == (0, 1)
    assert place((group(tp_size=2),), NODES).ranks == (0, 1)
    message = refused(SizeContradiction, group(tp_size=4), tensor_parallel_size=2)
    assert message.startswith("node_groups[0].tp_size is 4, but tensor_parallel_size is 2")
    refused(SizeContradiction, group(tp_size=1), tensor_parallel_size=2)


def test_ranks_need_devices_where_those_are_counted() -> None:
    assert place((), NODES, tensor_parallel_size=2, devices=2).ranks == (0, 1)
    assert "takes 3 ranks and there are 2 devices" in refused(
        SizeContradiction, tensor_parallel_size=3, devices=2
    )
    message = refused(UnknownName, group(ranks=(2,)), devices=2)
    assert message == "node_groups[0].ranks[0] is 2; allowed is a rank from 0 to 1"


@pytest.mark.behaviour("S0-02")
@pytest.mark.behaviour("S0-03")
def test_sequence_parallelism_turns_chunking_off_node_by_node_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = (group("vision", "dit", sp_size=2, tp_size=1), group("llm"))
    found = place(groups, NODES)
    assert found.ranks == (0, 1, 2)
    assert sorted(found.no_chunking) == ["dit", "vision"]

    class Code:
        def chunkable(self, graph_walk: str) -> bool:
            return True

    made = ChunkingManagement({node: Code() for node in NODES})
    made.set_policies({(node, "prefill"): ChunkingPolicy(64, chunkable=True) for node in ("vision", "llm")})
    with caplog.at_level(logging.INFO, "mstar.engine.chunking"):
        made.set_budgets({}, {n: facts.walks for n, facts in NODES.items()}, no_chunking=found.no_chunking)
    assert (made.chunkable("vision", "prefill"), made.chunkable("llm", "prefill")) == (False, True)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "node vision is not chunked and runs every prompt in one step: node_groups[0] runs it with sp_size "
        "2, and chunked prefill does not support sequence parallelism"
    ]
