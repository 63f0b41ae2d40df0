"""What holds for every graph, every order of events and every way to cut a prompt."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.graph.compile import compile_graph
from mstar.graph.program import NONE
from mstar.graph.runtime import Ended, GraphRuntime
from mstar.model.graphs import Walks, language_model
from tests.graph.random_walks import Account, RandomWalk

PROGRAM = compile_graph(language_model())
IDS = Walks.of(PROGRAM)
cuts = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@given(st.integers(0, 2**32), st.integers(0, 2**32))
@settings(max_examples=150)
def test_random_walks_run_every_node_on_the_values_of_its_own_iteration(drawn: int, order: int) -> None:
    walk = RandomWalk(Random(drawn))
    account = Account(walk, Random(order))
    account.run()
    account.settle()


@given(st.integers(0, 2**32), st.data())
@settings(max_examples=50)
def test_a_slot_dropped_anywhere_on_its_way_walks_again_as_if_new(drawn: int, data: st.DataObject) -> None:
    walk = RandomWalk(Random(drawn))
    account = Account(walk, Random(0))
    drive = account.drive
    ready = drive.admit("run")
    for _ in range(data.draw(st.integers(0, 12))):
        if not ready:
            break
        node = ready.pop()
        drive.start(node)
        if data.draw(st.booleans()):
            ready += drive.ready(drive.complete(node))
    drive.runtime.drop(0)
    assert drive.runtime.statistics() == ((0,), 0, 0)
    drive.cap(**walk.caps)
    account.run()
    account.settle()


@pytest.mark.behaviour("S4-06")
@given(cuts)
def test_strides_of_any_cut_add_up_to_the_prompt_and_the_token_leaves_once_at_its_end(cut: list[int]) -> None:
    runtime = GraphRuntime(PROGRAM, 1)
    runtime.set_loop_caps(0, {IDS.prompt_loop: sum(cut), IDS.decode_loop: 2})
    runtime.admit(0, IDS.prefill)
    for chunk, stride in enumerate(cut, 1):
        runtime.start(0, IDS.node)
        routed = runtime.complete(0, IDS.node, stride=stride)
        final = chunk == len(cut)
        assert bool(routed.edges) == final
        assert routed.walk == (IDS.decode if final else NONE)
    assert runtime.counter[IDS.prompt_loop, 0] == sum(cut)


@given(st.lists(st.tuples(cuts, st.integers(1, 8)), min_size=1, max_size=6))
def test_columns_and_single_rows_come_to_the_same_state(rows: list[tuple[list[int], int]]) -> None:
    """Every row's chunks and tokens, once through advance and finish, once through start and complete."""
    fast, slow = GraphRuntime(PROGRAM, len(rows)), GraphRuntime(PROGRAM, len(rows))
    for slot, (cut, budget) in enumerate(rows):
        for runtime in (fast, slow):
            runtime.set_loop_caps(slot, {IDS.prompt_loop: sum(cut), IDS.decode_loop: budget})
            runtime.admit(slot, IDS.prefill)
        fast.start(slot, IDS.node)
    left = [list(cut) for cut, _ in rows]
    walks = dict.fromkeys(range(len(rows)), IDS.prefill)
    while walks:
        ended: dict[int, Ended] = {}
        for loop, walk in ((IDS.prompt_loop, IDS.prefill), (IDS.decode_loop, IDS.decode)):
            slots = np.array([slot for slot in walks if walks[slot] == walk], np.int64)
            if not slots.size:
                continue
            strides = [left[slot].pop(0) if walk == IDS.prefill else 1 for slot in slots]
            finished = fast.advance(loop, slots, np.array(strides, np.int32))
            for slot, stride, done in zip(slots.tolist(), strides, finished.tolist(), strict=True):
                slow.start(slot, IDS.node)
                routed = slow.complete(slot, IDS.node, stride=stride)
                if done:
                    assert fast.finish(slot, loop) == routed
                    ended[slot] = routed.ended
                    if routed.walk != NONE:
                        fast.start(slot, IDS.node)
        assert fast.counter.tolist() == slow.counter.tolist()
        assert fast.walk.tolist() == slow.walk.tolist()
        walks = {slot: int(slow.walk[0, slot]) for slot in walks if ended.get(slot) is not Ended.PARTITION}
    assert slow.statistics() == fast.statistics() == ((0,), 0, 0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=64), st.data())
@settings(max_examples=30)
def test_a_batch_of_loops_ends_each_row_exactly_at_its_cap(caps: list[int], data: st.DataObject) -> None:
    runtime = GraphRuntime(PROGRAM, len(caps))
    for slot, cap in enumerate(caps):
        runtime.set_loop_caps(slot, {IDS.prompt_loop: cap})
        runtime.admit(slot, IDS.prefill)
    moved = [0] * len(caps)
    running = list(range(len(caps)))
    while running:
        strides = [data.draw(st.integers(1, caps[slot] - moved[slot])) for slot in running]
        finished = runtime.advance(IDS.prompt_loop, np.array(running), np.array(strides, np.int32))
        for slot, stride in zip(running, strides, strict=True):
            moved[slot] += stride
        assert finished.tolist() == [moved[slot] == caps[slot] for slot in running]
        running = [slot for slot in running if moved[slot] < caps[slot]]
    assert runtime.counter[IDS.prompt_loop].tolist() == caps


@given(st.integers(0, 2**32), st.integers(0, 2**32))
@settings(max_examples=80)
def test_loops_that_are_stopped_anywhere_still_come_to_the_end_of_the_walk(drawn: int, order: int) -> None:
    """A node in Loops stops one of them now and then; what is not in it runs as it would have."""
    walk, rng = RandomWalk(Random(drawn)), Random(order)
    drive = Account(walk, rng).drive
    loops = {spot.name: spot.loops for spot in walk.spots}
    ran = dict.fromkeys(loops, 0)
    ready, ended = drive.admit("run"), Ended.NOTHING
    while ended is Ended.NOTHING:
        node = ready.pop(rng.randrange(len(ready)))
        stops = loops[node] and rng.random() < 0.3
        routed = drive.run(node, stop=rng.choice(loops[node])) if stops else drive.run(node)
        ran[node] += 1
        ready += drive.ready(routed)
        ended = routed.ended
    assert not ready
    assert drive.runtime.statistics() == ((0,), 0, 0)
    for spot in walk.spots:
        assert 1 <= ran[spot.name] <= walk.runs(spot.loops)
