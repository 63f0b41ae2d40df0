"""A graph whose nodes run on several workers: each keeps the state of its own, and passes values on."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.graph.errors import GraphError, WalkStateError
from mstar.graph.layout import RouteKind
from mstar.graph.program import NONE
from mstar.graph.runtime import Ended, Routed
from tests.graph.drive import Drive
from tests.graph.models import any_to_any, encoder_decoder, nested_loops
from tests.graph.random_walks import RandomWalk

PROMPT = "thinker__thinker_prefill__tokens"


def test_a_worker_waits_for_what_another_one_makes() -> None:
    one = Drive(encoder_decoder(), here=("audio",))
    two = Drive(encoder_decoder(), here=("text", "denoise", "codec"), denoising_steps=2)
    assert one.admit("run") == ["audio"]
    assert two.admit("run") == ["text"]
    two.run("text")
    sent = one.run("audio")
    assert one.edges(sent) == ["audio.audio_states -> denoise.audio_states"]
    assert sent.ended is Ended.PARTITION
    assert two.deliver("run:denoise.audio_states") == "denoise"
    two.run("denoise")
    two.run("denoise")
    assert two.run("codec").ended is Ended.PARTITION


def test_the_worker_of_the_walk_that_follows_takes_the_local_transition_and_no_other_does() -> None:
    encoders = Drive(any_to_any(), here=("image_encoder", "audio_encoder"))
    thinker = Drive(any_to_any(), here=("thinker",), **{PROMPT: 4}, max_tokens=3)
    encoders.admit("thinker_prefill")
    assert thinker.admit("thinker_prefill") == []
    encoders.run("image_encoder")
    assert encoders.run("audio_encoder")[2:] == (NONE, Ended.WALK)
    thinker.deliver("thinker_prefill:thinker.image")
    thinker.deliver("thinker_prefill:thinker.audio")
    assert thinker.run("thinker", 4).walk == thinker.program.walk_id("thinker_decode")


def test_a_node_of_another_worker_cannot_start_here() -> None:
    drive = Drive(encoder_decoder(), here=("audio",))
    drive.admit("run")
    with pytest.raises(WalkStateError, match="node 'text' can't start"):
        drive.start("text")


def test_a_walk_of_which_nothing_runs_here_is_not_entered() -> None:
    drive = Drive(any_to_any(), here=("codec",))
    with pytest.raises(WalkStateError, match="enters walk 'thinker_prefill', but none of its nodes run here"):
        drive.admit("thinker_prefill")


def test_a_loop_is_not_torn_between_workers() -> None:
    with pytest.raises(
        GraphError, match="Loop 'frames' has some of its nodes here, but not plan, mix; put them"
    ):
        Drive(nested_loops(), here=("code",))


@given(st.integers(0, 2**32), st.integers(0, 2**32))
@settings(max_examples=60)
def test_two_workers_run_a_random_walk_to_its_end_between_them(drawn: int, order: int) -> None:
    """Nodes outside of Loops and whole Loops are dealt out; forward edges between the two are delivered."""
    walk, rng = RandomWalk(Random(drawn)), Random(order)
    side = {
        name: rng.randrange(2) for name in [spot.loops[0] if spot.loops else spot.name for spot in walk.spots]
    }
    home = {spot.name: side[spot.loops[0] if spot.loops else spot.name] for spot in walk.spots}
    workers = [
        Drive(walk.graph, here=tuple(name for name in home if home[name] == at), **walk.caps) for at in (0, 1)
    ]
    program = workers[0].program
    ready = [
        (at, node) for at, worker in enumerate(workers) if at in home.values() for node in worker.admit("run")
    ]
    ran = dict.fromkeys(home, 0)
    ended = [at not in home.values() for at in (0, 1)]

    def cross(at: int, routed: Routed) -> None:
        for edge in routed.edges:
            if program.edge.kind[edge] == RouteKind.FORWARD:
                port = int(program.edge.port[edge])
                to = program.nodes[program.place.node[program.port.place[port]]]
                if home[to] != at and workers[1 - at].runtime.deliver(0, port) != NONE:
                    ready.append((1 - at, to))

    while ready:
        at, node = ready.pop(rng.randrange(len(ready)))
        routed = workers[at].run(node)
        ran[node] += 1
        ready += [(at, name) for name in workers[at].ready(routed)]
        cross(at, routed)
        ended[at] |= routed.ended is Ended.PARTITION
    assert all(ended)
    assert ran == {spot.name: walk.runs(spot.loops) for spot in walk.spots}
