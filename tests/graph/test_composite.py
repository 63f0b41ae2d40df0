"""A toy of a composite model: encoders side by side, a chunked thinker, a talker fed by its stream, a codec.

The three partitions are walked as a worker does: the thinker by itself, the others a piece at a time.
"""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.graph.errors import WalkStateError
from mstar.graph.layout import RouteKind
from mstar.graph.model import ModelGraph
from mstar.graph.nodes import CLIENT, GraphEdge, GraphNode, Loop, StreamingGraphEdge
from mstar.graph.policy import ChunkingPolicy
from mstar.graph.program import NONE
from mstar.graph.runtime import Ended
from mstar.graph.schedule import WalkOrder
from tests.graph.drive import Drive
from tests.graph.models import any_to_any

PROMPT = "thinker__thinker_prefill__tokens"


def thinking(tokens: int = 100, max_tokens: int = 4) -> Drive:
    """A request whose encoders have run and whose thinker is ready for its first chunk."""
    drive = Drive(any_to_any(), **{PROMPT: tokens}, max_tokens=max_tokens)
    assert drive.admit("thinker_prefill") == ["image_encoder", "audio_encoder"]
    drive.start("image_encoder", "audio_encoder")
    assert drive.ready(drive.complete("audio_encoder")) == []
    assert drive.ready(drive.complete("image_encoder")) == ["thinker"]
    return drive


@pytest.mark.behaviour("S0-52")
def test_each_chunk_sends_its_piece_and_only_the_final_one_the_token() -> None:
    drive = thinking(tokens=100)
    chunks = [drive.run("thinker", stride) for stride in (40, 40, 20)]
    assert [drive.edges(chunk) for chunk in chunks] == [
        ["thinker.states -> talker.states"],
        ["thinker.states -> talker.states"],
        ["thinker.states -> talker.states", "thinker.token -> @client", "thinker.token -> @next"],
    ]
    walks = {int(drive.program.place.walk[piece_place(drive, chunk.edges[0])]) for chunk in chunks}
    assert walks == {drive.program.walk_id("talker_prefill")}


def piece_place(drive: Drive, edge: int) -> int:
    """The place that a stream's edge feeds."""
    return int(drive.program.port.place[drive.program.edge.port[edge]])


def test_a_chunk_without_a_piece_sends_none_and_the_loop_moves_all_the_same() -> None:
    drive = thinking(tokens=10)
    drive.start("thinker")
    assert drive.edges(drive.complete("thinker", outputs="", stride=6)) == []
    assert drive.counter("thinker.thinker_prefill.chunks") == 6


def test_the_final_chunk_has_to_make_what_the_next_walk_waits_for() -> None:
    drive = thinking(tokens=10)
    drive.start("thinker")
    with pytest.raises(WalkStateError, match=r"made nothing for 'thinker_prefill: thinker.token -> @next'"):
        drive.complete("thinker", outputs="states", stride=10)


def test_the_worker_takes_the_thinker_from_prefill_to_decode_and_leaves_the_talker_to_others() -> None:
    drive = thinking(tokens=10, max_tokens=3)
    routed = drive.run("thinker", 10)
    assert routed.walk == drive.program.walk_id("thinker_decode")
    drive.admit("talker_prefill")
    assert drive.deliver("talker_prefill:talker.states") == "talker"
    piece = drive.run("talker")
    assert (piece.ended, piece.walk) == (Ended.WALK, NONE)


@pytest.mark.behaviour("B-05")
def test_a_piece_that_arrives_while_one_is_in_use_starts_nothing() -> None:
    drive = thinking(tokens=10)
    drive.cap(max_frames=3)
    drive.admit("talker_prefill")
    drive.deliver("talker_prefill:talker.states")
    drive.start("talker")
    assert not drive.wants("talker_prefill:talker.states")
    drive.complete("talker")
    assert drive.admit("talker_decode") == []
    assert drive.deliver("talker_decode:talker.states") == "talker"
    assert not drive.wants("talker_decode:talker.states")
    drive.start("talker")
    assert drive.wants("talker_decode:talker.states")
    assert drive.deliver("talker_decode:talker.states") is None
    assert drive.ready(drive.complete("talker")) == ["talker"]
    drive.start("talker")
    assert drive.ready(drive.complete("talker")) == []
    assert drive.deliver("talker_decode:talker.states") == "talker"


@pytest.mark.behaviour("B-05")
def test_a_piece_that_is_cut_into_chunks_is_held_until_its_last_one_and_then_the_next_is_wanted() -> None:
    """A talker in turns: in each it takes a piece of the stream and prefills it in chunks."""
    source = GraphNode("source", ("x",), (StreamingGraphEdge("piece", "talker", walk="talk"),))
    talker = GraphNode("talker", ("piece",), (GraphEdge("voice", CLIENT),))
    drive = Drive(
        ModelGraph(
            walks={"make": source, "talk": Loop("turns", talker, cap="turns")},
            partitions={
                "source": WalkOrder(("make",), frozenset(("make",)), inputs={"make": ("x",)}),
                "talker": WalkOrder(("talk",), frozenset(("talk",))),
            },
            chunking_policies={("talker", "talk"): ChunkingPolicy(8, chunkable=True)},
        ),
        turns=2,
        talker__talk__tokens=9,
    )
    drive.admit("talk")
    for _ in range(2):
        assert drive.deliver("talk:talker.piece") == "talker"
        for _ in range(2):
            drive.start("talker")
            assert not drive.wants("talk:talker.piece")
            assert drive.ready(drive.complete("talker", stride=4)) == ["talker"]
            assert not drive.wants("talk:talker.piece")
        end = drive.run("talker")
        assert drive.edges(end) == ["talker.voice -> @client"]
        assert drive.ready(end) == []
    assert end.ended is Ended.PARTITION


def test_partitions_of_a_slot_do_not_see_each_other() -> None:
    drive = thinking(tokens=10, max_tokens=1)
    drive.admit("talker_prefill")
    drive.deliver("talker_prefill:talker.states")
    assert drive.run("thinker", 10).ended is Ended.PARTITION
    assert drive.runtime.statistics().walking == (0, 1, 0)
    drive.run("talker")


@given(
    cut=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    budget=st.integers(1, 6),
    order=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_any_order_of_the_partitions_consumes_every_piece_once_and_in_order(
    cut: list[int], budget: int, order: int
) -> None:
    """One piece of states per chunk and token, one of codes per talker step, in any interleaving."""
    rng = Random(order)
    drive = thinking(sum(cut), budget)
    program = drive.program
    frames = budget - 1
    if frames:
        drive.cap(max_frames=frames)
    chunks, thinker_ends = deque(cut), False
    # Pieces on their way, as (the port they feed, the number of the piece).
    pieces: dict[str, deque[tuple[int, int]]] = {"talker": deque(), "codec": deque()}
    made, taken = {"talker": 0, "codec": 0}, {"talker": 0, "codec": 0}

    def send(edges: tuple[int, ...]) -> None:
        for edge in edges:
            if program.edge.kind[edge] == RouteKind.STREAM:
                port = int(program.edge.port[edge])
                to = program.nodes[program.place.node[program.port.place[port]]]
                pieces[to].append((port, made[to]))
                made[to] += 1

    while not thinker_ends or any(pieces.values()):
        able = [name for name, queue in pieces.items() if queue] + ["thinker"] * (not thinker_ends)
        node = rng.choice(able)
        if node == "thinker":
            routed = drive.run("thinker", chunks.popleft() if chunks else 1)
            thinker_ends = routed.ended is Ended.PARTITION
        else:
            port, number = pieces[node].popleft()
            assert number == taken[node]
            taken[node] += 1
            walk = int(program.place.walk[program.port.place[port]])
            partition = int(program.walk.partition[walk])
            if drive.runtime.walk[partition, 0] != walk:
                drive.runtime.admit(0, walk)
            assert drive.runtime.deliver(0, port) == program.node_id(node)
            routed = drive.run(node)
        send(routed.edges)
    assert not chunks
    assert made == taken == {"talker": len(cut) + budget - 1, "codec": budget - 1}
    assert drive.runtime.statistics() == ((0, 0, 0), 0, 0)
