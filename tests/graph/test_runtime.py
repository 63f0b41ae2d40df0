"""One request on its way through a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mstar.graph.compile import compile_graph
from mstar.graph.errors import WalkStateError
from mstar.graph.nodes import CLIENT, GraphEdge, GraphNode, Loop, Parallel, Sequential
from mstar.graph.program import NONE
from mstar.graph.runtime import END_PARTITION, PENDING, Ended, GraphRuntime
from mstar.model.graphs import Walks, language_model
from tests.graph.drive import Drive
from tests.graph.models import encoder_decoder, nested_loops, one_walk, token_loop

PROGRAM = compile_graph(language_model())
IDS = Walks.of(PROGRAM)


def decoding(slots: int, cap: int) -> GraphRuntime:
    """A runtime with ``slots`` rows in the decode Loop, their node in flight."""
    runtime = GraphRuntime(PROGRAM, slots)
    for slot in range(slots):
        runtime.set_loop_caps(slot, {IDS.prompt_loop: 1, IDS.decode_loop: cap})
        runtime.admit(slot, IDS.prefill)
        runtime.start(slot, IDS.node)
        runtime.complete(slot, IDS.node)
        runtime.start(slot, IDS.node)
    return runtime


def state(runtime: GraphRuntime) -> dict[str, Any]:
    """All of a runtime's state, as values that compare."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else repr(value)
        for name, value in vars(runtime).items()
        if name not in ("program", "_masks", "_counters", "_caps")
    }


# ---- nodes, joins and loops ------------------------------------------------------------------


def test_a_join_waits_for_all_its_branches_in_any_order() -> None:
    drive = Drive(encoder_decoder(), denoising_steps=1)
    assert drive.admit("run") == ["audio", "text"]
    drive.start("audio", "text")
    assert drive.ready(drive.complete("text")) == []
    assert drive.ready(drive.complete("audio")) == ["denoise"]


def test_a_loop_carries_its_value_back_and_sends_the_last_one_on() -> None:
    drive = Drive(encoder_decoder(), denoising_steps=3)
    drive.admit("run")
    drive.run("audio")
    drive.run("text")
    again = ["denoise.latent -> denoise.latent"]
    assert [drive.edges(drive.run("denoise")) for _ in range(2)] == [again, again]
    last = drive.run("denoise")
    assert drive.edges(last) == ["denoise.latent -> codec.latent"]
    assert drive.ready(last) == ["codec"]
    end = drive.run("codec")
    assert drive.edges(end) == ["codec.media -> @client"]
    assert end.ended is Ended.PARTITION


def test_a_loop_holds_what_comes_from_outside_through_its_iterations() -> None:
    drive = Drive(encoder_decoder(), denoising_steps=3)
    drive.admit("run")
    drive.run("audio")
    drive.run("text")
    assert drive.ready(drive.run("denoise")) == ["denoise"]


def test_an_inner_loop_begins_anew_with_each_iteration_of_the_outer_one() -> None:
    drive = Drive(nested_loops(), frames=2, codes=3)
    assert drive.admit("run") == ["plan"]
    order: list[str] = []
    ready = ["plan"]
    while ready:
        order += ready
        routed = drive.run(ready[0])
        ready = drive.ready(routed)
    assert order == [*["plan", "code", "code", "code", "mix"] * 2, "render"]
    assert routed.ended is Ended.PARTITION


def test_the_last_iteration_of_an_outer_loop_carries_nothing_back() -> None:
    drive = Drive(nested_loops(), frames=1, codes=1)
    drive.admit("run")
    drive.run("plan")
    assert drive.edges(drive.run("code")) == ["code.next -> mix.codes"]
    assert drive.edges(drive.run("mix")) == ["mix.frame -> @client", "mix.state -> render.state"]


def test_a_stopped_loop_ends_with_its_iteration_and_is_whole_again_in_the_next() -> None:
    drive = Drive(nested_loops(), frames=2, codes=3)
    drive.admit("run")
    drive.run("plan")
    assert drive.edges(drive.run("code", stop="codes")) == ["code.next -> mix.codes"]
    assert drive.ready(drive.run("mix")) == ["plan"]
    drive.run("plan")
    assert [drive.ready(drive.run("code")) for _ in range(3)] == [["code"], ["code"], ["mix"]]


def test_a_node_can_stop_a_loop_further_out() -> None:
    drive = Drive(nested_loops(), frames=9, codes=9)
    drive.admit("run")
    drive.run("plan")
    drive.run("code", stop="frames")
    assert drive.edges(drive.run("mix")) == ["mix.frame -> @client", "mix.state -> render.state"]


def test_nodes_without_edges_between_them_run_side_by_side_and_the_walk_waits_for_both() -> None:
    section = Parallel((GraphNode("a", ("x",)), GraphNode("b", ("y",))))
    drive = Drive(one_walk(section, "x", "y"))
    assert drive.admit("run") == ["a", "b"]
    assert drive.run("a").ended is Ended.NOTHING
    assert drive.run("b").ended is Ended.PARTITION


def test_a_walk_can_begin_before_all_its_inputs_are_there() -> None:
    drive = Drive(encoder_decoder(), denoising_steps=1)
    assert drive.admit("run", "run:text.prompt") == ["text"]
    assert drive.deliver("run:denoise.latent") is None
    assert drive.deliver("run:audio.wave") == "audio"


def test_what_goes_to_the_client_may_be_missing_from_a_pass() -> None:
    drive = Drive(one_walk(GraphNode("a", ("x",), (GraphEdge("y", CLIENT),)), "x"))
    drive.admit("run")
    drive.start("a")
    assert drive.complete("a", outputs="").edges == ()


# ---- the chunk Loop --------------------------------------------------------------------------


@pytest.mark.behaviour("S4-06")
@pytest.mark.parametrize("strides", [[10], [4, 6], [1] * 10, [9, 1]])
def test_a_loop_that_counts_tokens_ends_at_its_cap_however_it_is_cut(strides: list[int]) -> None:
    drive = Drive(token_loop(), length=10)
    drive.admit("run")
    routed = [drive.run("lm", stride) for stride in strides]
    assert [drive.edges(one) for one in routed[:-1]] == [[]] * (len(strides) - 1)
    assert drive.edges(routed[-1]) == ["lm.out -> @client"]
    assert drive.counter("tokens") == 10


@pytest.mark.behaviour("S4-06")
def test_a_chunk_past_the_end_of_the_input_is_an_error() -> None:
    drive = Drive(token_loop(), length=10)
    drive.admit("run")
    drive.run("lm", 4)
    drive.start("lm")
    with pytest.raises(
        WalkStateError, match=r"Loop 'tokens' is at 4 of 10 and moves by 7; it may move 1 to 6"
    ):
        drive.complete("lm", stride=7)


def test_only_the_final_chunk_can_stop_anything() -> None:
    runtime = GraphRuntime(PROGRAM, 1)
    runtime.set_loop_caps(0, {IDS.prompt_loop: 9, IDS.decode_loop: 5})
    runtime.admit(0, IDS.prefill)
    runtime.start(0, IDS.node)
    with pytest.raises(WalkStateError, match="stops at 4 of 9 tokens of its input; only the final chunk"):
        runtime.complete(0, IDS.node, stride=4, stop=END_PARTITION)


@pytest.mark.behaviour("B-05")
def test_an_input_that_arrives_between_two_chunks_starts_the_row_no_second_time() -> None:
    runtime = GraphRuntime(PROGRAM, 1)
    prompt = PROGRAM.port_id("prefill", "llm", "prompt")
    runtime.set_loop_caps(0, {IDS.prompt_loop: 9, IDS.decode_loop: 5})
    assert runtime.admit(0, IDS.prefill, []) == ()
    assert runtime.deliver(0, prompt) == IDS.node
    for _ in range(3):
        runtime.start(0, IDS.node)
        assert not runtime.wants(0, prompt)
        with pytest.raises(WalkStateError, match=r"wants no value for 'prefill: llm.prompt'"):
            runtime.deliver(0, prompt)
        with pytest.raises(WalkStateError, match="node 'llm' can't start, it is in flight already"):
            runtime.start(0, IDS.node)
        runtime.complete(0, IDS.node, stride=3)


@pytest.mark.behaviour("B-05")
def test_a_row_that_moves_as_a_column_is_in_flight_until_it_finishes() -> None:
    runtime = decoding(1, cap=4)
    for _ in range(3):
        assert not runtime.ready[IDS.node, 0]
        with pytest.raises(WalkStateError, match="in flight already"):
            runtime.start(0, IDS.node)
        runtime.advance(IDS.decode_loop, np.array([0]))
    assert runtime.finish(0, IDS.decode_loop).ended is Ended.PARTITION


# ---- columns ---------------------------------------------------------------------------------


def test_counters_and_caps_are_columns_that_others_may_keep() -> None:
    runtime = decoding(4, cap=8)
    column = runtime.counter[IDS.decode_loop]
    runtime.advance(IDS.decode_loop, np.array([1, 3]))
    assert column.dtype == runtime.cap.dtype == np.int32
    assert column.tolist() == [1, 2, 1, 2]
    runtime.cap[IDS.decode_loop, 3] = 3
    assert runtime.advance(IDS.decode_loop, np.array([1, 3])).tolist() == [False, True]


def test_advance_says_which_rows_are_at_their_cap() -> None:
    runtime = decoding(3, cap=4)
    assert not runtime.advance(IDS.decode_loop, np.array([0, 2])).any()
    strides = np.array([2, 1, 1], np.int32)
    assert runtime.advance(IDS.decode_loop, np.array([0, 1, 2]), strides).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("slots", "strides", "message"),
    [
        ([0, 1], [1, 4], r"slot 1: Loop 'llm.decode.tokens' is at 1 of 4 and moves by 4; it may move 1 to 3"),
        ([0, 1], [1, 0], r"slot 1: .* moves by 0"),
        ([0, 1], [-1, 1], r"slot 0: .* moves by -1"),
        ([0, 2], [1, 1], r"slot 2 moves Loop 'llm.decode.tokens', but has not come to it"),
    ],
)
def test_advance_names_the_first_row_that_does_not_fit_and_moves_none(
    slots: list[int], strides: list[int], message: str
) -> None:
    runtime = decoding(3, cap=4)
    runtime.drop(2)
    before = state(runtime)
    with pytest.raises(WalkStateError, match=message):
        runtime.advance(IDS.decode_loop, np.array(slots), np.array(strides, np.int32))
    assert state(runtime) == before


def test_a_row_at_its_cap_moves_no_further() -> None:
    runtime = decoding(1, cap=2)
    runtime.advance(IDS.decode_loop, np.array([0]))
    with pytest.raises(WalkStateError, match="is at 2 of 2 and moves by 1; it may move no further"):
        runtime.advance(IDS.decode_loop, np.array([0]))


@pytest.mark.parametrize(
    "body",
    [Sequential((GraphNode("a", ("x",)), GraphNode("b", ("x",)))), Loop("m", GraphNode("a", ("x",)), "n")],
)
def test_only_a_loop_over_one_node_is_a_column(body: Sequential | Loop) -> None:
    drive = Drive(one_walk(Loop("l", body, cap="n"), "x"), n=2)
    drive.admit("run")
    drive.start("a")
    loop = drive.program.loop_id("l")
    with pytest.raises(WalkStateError, match="Loop 'l' is not one node that repeats; complete the nodes in"):
        drive.runtime.advance(loop, np.array([0]))
    with pytest.raises(WalkStateError, match="Loop 'l' is not one node that repeats; complete the nodes in"):
        drive.runtime.finish(0, loop, stop=loop)


def test_a_walk_may_have_more_nodes_inputs_and_loops_than_a_machine_word_has_bits() -> None:
    inputs = tuple(f"in{at}" for at in range(100))
    loops = tuple(
        Loop(f"l{at}", GraphNode(f"n{at}", ("x",)), cap="n", outputs=(GraphEdge("y", "join", name),))
        for at, name in enumerate(inputs)
    )
    drive = Drive(one_walk(Sequential((Parallel(loops), GraphNode("join", inputs))), "x"), n=2)
    ready = drive.admit("run")
    assert len(ready) == 100
    last = [drive.ready(drive.run(node)) and drive.ready(drive.run(node)) for node in ready]
    assert last == [[]] * 99 + [["join"]]
    assert drive.run("join").ended is Ended.PARTITION


def test_a_loop_finishes_at_its_cap_or_with_a_stop() -> None:
    runtime = decoding(1, cap=4)
    with pytest.raises(WalkStateError, match="finished in walk 'decode' at 1 of 4; it ends in its own walk"):
        runtime.finish(0, IDS.decode_loop)
    assert runtime.finish(0, IDS.decode_loop, stop=IDS.decode_loop).ended is Ended.PARTITION


# ---- comings and goings ----------------------------------------------------------------------


def test_a_dropped_slot_is_as_new_and_dropping_it_again_changes_nothing() -> None:
    fresh = state(GraphRuntime(PROGRAM, 2))
    runtime = decoding(2, cap=9)
    runtime.drop(1)
    runtime.set_loop_caps(1, {IDS.decode_loop: 9}, counted={IDS.decode_loop: 4})
    runtime.drop(1)
    runtime.drop(0)
    assert state(runtime) == fresh
    runtime.drop(0)
    assert state(runtime) == fresh


def test_a_drop_touches_no_other_slot() -> None:
    runtime = decoding(3, cap=9)
    runtime.drop(1)
    assert runtime.counter[IDS.decode_loop].tolist() == [1, PENDING, 1]
    assert runtime.walk.tolist() == [[IDS.decode, NONE, IDS.decode]]
    assert runtime.statistics().flying == 2


def test_what_was_in_flight_when_its_partition_ended_completes_without_effect() -> None:
    section = Loop("l", Sequential((GraphNode("a", ("x",)), GraphNode("b", ("x",)))), cap="n")
    drive = Drive(one_walk(section, "x"), n=2)
    drive.admit("run")
    drive.start("a", "b")
    assert drive.complete("a", stop=END_PARTITION).ended is Ended.PARTITION
    with pytest.raises(
        WalkStateError, match="enters walk 'run', but b of the walk before is still in flight"
    ):
        drive.admit("run")
    late = drive.complete("b")
    assert (late.edges, late.ready, late.ended) == ((), (), Ended.NOTHING)
    assert drive.admit("run") == ["a", "b"]


def test_a_partition_that_ended_starts_nothing_again() -> None:
    runtime = decoding(1, cap=2)
    runtime.advance(IDS.decode_loop, np.array([0]))
    assert runtime.finish(0, IDS.decode_loop).ended is Ended.PARTITION
    assert runtime.walk[0, 0] == NONE
    assert not runtime.ready.any()
    with pytest.raises(WalkStateError, match="can't start"):
        runtime.start(0, IDS.node)


def test_a_cap_may_be_raised_while_its_loop_runs_but_not_fall_below_its_counter() -> None:
    runtime = decoding(1, cap=4)
    runtime.advance(IDS.decode_loop, np.array([0]), 2)
    runtime.set_loop_caps(0, {IDS.decode_loop: 9})
    with pytest.raises(
        WalkStateError, match=r"the cap of Loop 'llm.decode.tokens' is 2; give 3 to 2147483646"
    ):
        runtime.set_loop_caps(0, {IDS.decode_loop: 2})
    with pytest.raises(WalkStateError, match=r"1 counted before Loop .* before its walk is entered"):
        runtime.set_loop_caps(0, {}, counted={IDS.decode_loop: 1})


def test_a_loop_inside_a_walk_has_at_least_one_iteration() -> None:
    drive = Drive(encoder_decoder())
    with pytest.raises(WalkStateError, match="the cap of Loop 'steps' is 0; give 1 to"):
        drive.cap(denoising_steps=0)


def started(drive: Drive) -> Drive:
    drive.admit("run")
    drive.start("audio")
    return drive


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.admit("run"), r"slot 0 enters walk 'run', but is in 'run'; drop it or end that first"),
        (
            lambda d: d.start("denoise"),
            r"node 'denoise' can't start, its inputs are not there, or it has run",
        ),
        (lambda d: d.start("audio"), r"node 'audio' can't start, it is in flight already"),
        (lambda d: d.complete("text"), r"node 'text' has run, but was not started"),
        (
            lambda d: d.complete("audio", outputs=""),
            r"made nothing for 'run: audio.audio_states -> denoise.aud",
        ),
        (lambda d: d.complete("audio", stride=2), r"node 'audio' moves on by 2; give 1"),
        (lambda d: d.complete("audio", stop="steps"), r"node 'audio' stops Loop 'steps', which it is not in"),
        (
            lambda d: d.deliver("run:audio.wave"),
            r"slot 0 is in walk 'run' and wants no value for 'run: audio.w",
        ),
        (lambda d: d.deliver("run:denoise.audio_states"), r"wants no value for 'run: denoise.audio_states'"),
    ],
)
def test_what_does_not_fit_the_state_of_a_slot_is_refused_and_changes_nothing(
    call: Callable[[Drive], Any], message: str
) -> None:
    drive = started(Drive(encoder_decoder(), denoising_steps=2))
    before = state(drive.runtime)
    with pytest.raises(WalkStateError, match=message):
        call(drive)
    assert state(drive.runtime) == before


def test_a_loop_without_its_cap_set_cannot_run() -> None:
    drive = Drive(encoder_decoder())
    drive.admit("run")
    drive.run("audio")
    drive.run("text")
    with pytest.raises(
        WalkStateError, match="Loop 'steps' is at 0 of 0 and moves by 1; it may move no further"
    ):
        drive.run("denoise")


def test_a_walk_whose_budget_is_spent_is_not_entered() -> None:
    runtime = GraphRuntime(PROGRAM, 1)
    runtime.set_loop_caps(0, {IDS.decode_loop: 1})
    with pytest.raises(WalkStateError, match="the cap of its Loop is reached before it begins"):
        runtime.admit(0, IDS.decode)


def test_only_walks_declared_to_may_end_their_partition_early() -> None:
    runtime = GraphRuntime(compile_graph(language_model(samples_at_prefill=False)), 1)
    runtime.set_loop_caps(0, {IDS.prompt_loop: 1, IDS.decode_loop: 5})
    runtime.admit(0, IDS.prefill)
    runtime.start(0, IDS.node)
    with pytest.raises(
        WalkStateError, match="ends its partition in walk 'prefill', which is not declared to"
    ):
        runtime.complete(0, IDS.node, stop=END_PARTITION)


def test_statistics_count_what_walks_waits_and_flies() -> None:
    runtime = decoding(3, cap=9)
    assert runtime.statistics() == ((3,), 0, 3)
    runtime.complete(1, IDS.node)
    runtime.drop(2)
    assert runtime.statistics() == ((2,), 1, 1)
