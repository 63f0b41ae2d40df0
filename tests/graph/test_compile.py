"""The integer tables of a graph."""

from __future__ import annotations

import numpy as np
import pytest

from mstar.graph.compile import compile_graph
from mstar.graph.errors import GraphError
from mstar.graph.layout import RouteKind
from mstar.graph.model import ModelGraph
from mstar.graph.program import NONE, Program
from mstar.model.graphs import language_model
from tests.graph.models import any_to_any, encoder_decoder, nested_loops

GRAPHS = {
    "language_model": language_model(),
    "encoder_decoder": encoder_decoder(),
    "nested_loops": nested_loops(),
    "any_to_any": any_to_any(),
}


def columns(program: Program) -> list[np.ndarray]:
    tables = (program.place, program.port, program.edge, program.loop, program.walk)
    ranges = (program.walk_places, program.place_edges, program.loop_edges, program.consumers, program.ready)
    return [column for table in (*tables, *ranges) for column in table] + [program.place_of, program.label_of]


@pytest.mark.parametrize("name", GRAPHS)
def test_every_table_is_int32_and_cannot_be_written(name: str) -> None:
    for column in columns(compile_graph(GRAPHS[name])):
        assert column.dtype == np.int32
        assert not column.flags.writeable


@pytest.mark.parametrize("name", GRAPHS)
def test_every_edge_leaves_at_one_time(name: str) -> None:
    program = compile_graph(GRAPHS[name])
    lists = [program.place_edges.of(p) for p in range(program.place.node.size)]
    for edges in (program.loop_edges, program.back_edges):
        lists += [edges.of(loop) for loop in range(len(program.loops))]
    assert sorted(edge for edges in lists for edge in edges) == list(range(len(program.edge_names)))


@pytest.mark.parametrize("name", GRAPHS)
def test_every_port_is_fed_from_one_side(name: str) -> None:
    program = compile_graph(GRAPHS[name])
    kinds = program.edge.kind
    for port in range(len(program.port_names)):
        feeding = kinds[program.edge.port == port].tolist()
        assert feeding.count(RouteKind.FORWARD) == (0 if program.port.outside[port] else 1)
        assert feeding.count(RouteKind.BACK) == (0 if program.port.back[port] == NONE else 1)
        assert (RouteKind.STREAM in feeding) == bool(program.port.stream[port])


def test_the_tables_of_two_encoders_and_a_loop() -> None:
    program = compile_graph(encoder_decoder())
    assert program.nodes == ("audio", "text", "denoise", "codec")
    assert program.place_of.tolist() == [[0, 1, 2, 3]]
    assert [program.consumers.of(place) for place in range(4)] == [[2], [2], [2, 3], []]
    assert program.ready.of(0) == [0, 1]
    assert program.place.loop.tolist() == [NONE, NONE, 0, NONE]
    assert program.loop.first.tolist() == [2]
    assert program.loop.last.tolist() == [3]
    assert program.edge_names == (
        "run: audio.audio_states -> denoise.audio_states",
        "run: text.text_states -> denoise.text_states",
        "run: denoise.latent -> denoise.latent",
        "run: codec.media -> @client",
        "run: denoise.latent -> codec.latent",
    )
    assert program.edge.exit.tolist() == [NONE, NONE, NONE, NONE, 0]


def test_what_waits_for_a_stream_is_not_ready_when_its_walk_begins() -> None:
    program = compile_graph(any_to_any())
    ready = {walk: program.ready.of(w) for w, walk in enumerate(program.walks)}
    assert [len(places) for places in ready.values()] == [2, 1, 0, 0, 0]


def test_a_loop_in_a_loop_knows_the_one_around_it() -> None:
    program = compile_graph(nested_loops())
    assert program.loops == ("frames", "codes")
    assert program.loop.parent.tolist() == [NONE, 0]
    assert program.port.scope[program.port_id("run", "code", "seed")] == program.loop_id("frames")
    assert program.port.back[program.port_id("run", "code", "seed")] == program.loop_id("codes")


def test_the_walks_of_a_language_model() -> None:
    program = compile_graph(language_model())
    assert program.walk.next.tolist() == [1, NONE]
    assert program.walk.first.tolist() == [1, 0]
    assert program.walk.ends.tolist() == [0, 1]
    assert program.walk.may_end.tolist() == [1, 1]
    assert program.walk.gate.tolist() == [0, 1]
    assert program.loop.start.tolist() == [0, 1]
    assert program.loop.tokens.tolist() == [1, 0]
    assert program.label_of.tolist() == [[2, 2]]
    assert program.members.of(0) == [0, 1]
    assert program.labels == ("prefill", "decode", "prefill_decode")


def test_partitions_number_their_walks_and_streams_name_the_port_they_feed() -> None:
    program = compile_graph(any_to_any())
    assert program.walk.partition.tolist() == [0, 0, 1, 1, 2]
    streams = [
        (program.edge_names[edge], program.port_names[program.edge.port[edge]])
        for edge in np.flatnonzero(program.edge.kind == RouteKind.STREAM)
    ]
    assert streams == [
        ("thinker_prefill: thinker.states -> talker.states", "talker_prefill: talker.states"),
        ("thinker_decode: thinker.states -> talker.states", "talker_decode: talker.states"),
        ("talker_decode: talker.codes -> codec.codes", "decode_audio: codec.codes"),
    ]


def test_caps_by_name_are_those_of_all_loops_that_use_the_name() -> None:
    program = compile_graph(language_model())
    assert program.caps_of({"max_tokens": 7}) == {program.loop_id("llm.decode.tokens"): 7}
    with pytest.raises(
        GraphError, match=r"there is no cap 'max_token'; there are llm.prefill.tokens, max_tokens"
    ):
        program.caps_of({"max_token": 7})


@pytest.mark.parametrize("kind", ["node", "walk", "loop", "output"])
def test_a_name_that_is_not_there_is_refused_with_those_that_are(kind: str) -> None:
    program = compile_graph(language_model())
    with pytest.raises(GraphError, match=f"(?i)there is no {kind} 'nothing'; there are "):
        getattr(program, f"{kind}_id")("nothing")


def test_compiling_twice_gives_equal_tables() -> None:
    graph: ModelGraph = any_to_any()
    for one, two in zip(columns(compile_graph(graph)), columns(compile_graph(graph)), strict=True):
        assert np.array_equal(one, two)
