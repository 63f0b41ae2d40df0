"""Virtual streams and collectives: who meets, who waits forever, and what is told of it."""

from __future__ import annotations

from random import Random

import pytest

from mstar.engine.results import ResultSlot
from mstar.simulation.clock import RankClock, VirtualClock
from mstar.simulation.device import Collectives, Launched, Stream
from mstar.simulation.invariants import Broken
from mstar.simulation.schedule import LinearCost
from mstar.worker.budget import StepWork

WORK = StepWork(1, 1, 1)


def _streams(*slowness: float) -> tuple[VirtualClock, Collectives, list[Stream]]:
    clock = VirtualClock(Random(0))
    everyone = tuple(range(len(slowness)))
    collectives = Collectives(clock, LinearCost(100), (everyone, everyone, (0,)))
    return (
        clock,
        collectives,
        [Stream(i, collectives, RankClock(clock), slow) for i, slow in enumerate(slowness)],
    )


def _step(seq: int, node: int = 0, rows: bytes = b"rows", tokens: bytes = b"tokens", at: int = 0) -> Launched:
    return Launched(seq, node, rows, tokens, WORK, at)


def _run(clock: VirtualClock) -> None:
    while clock.step():
        pass


def test_a_step_starts_when_the_last_rank_comes_and_takes_as_long_as_the_slowest() -> None:
    clock, _, streams = _streams(1.0, 3.0)
    results = [ResultSlot(1), ResultSlot(1)]
    streams[0].launch(_step(1), results[0])
    streams[1].launch(_step(1, at=50), results[1])
    _run(clock)
    assert clock.now == 350
    assert all(stream.landed(1) for stream in streams)
    assert [slot.elapsed_ns for slot in results] == [300, 300]


def test_a_node_of_one_rank_waits_for_nobody() -> None:
    clock, _, streams = _streams(1.0, 1.0)
    streams[0].launch(_step(1, node=2), ResultSlot(1))
    _run(clock)
    assert streams[0].landed(1)


@pytest.mark.parametrize(
    ("field", "other"), [("rows", _step(1, rows=b"x")), ("tokens", _step(1, tokens=b"x"))]
)
def test_ranks_that_bring_different_steps_are_named(field: str, other: Launched) -> None:
    _, _, streams = _streams(1.0, 1.0)
    streams[0].launch(_step(1), ResultSlot(1))
    with pytest.raises(Broken, match=f"{field} differ between rank 0 and rank 1"):
        streams[1].launch(other, ResultSlot(1))


def test_ranks_that_meet_for_different_nodes_are_named() -> None:
    _, _, streams = _streams(1.0, 1.0)
    streams[0].launch(_step(1), ResultSlot(1))
    with pytest.raises(Broken, match="node differ"):
        streams[1].launch(_step(1, node=1), ResultSlot(1))


def test_two_groups_that_launch_in_different_orders_would_deadlock_and_are_told() -> None:
    _, _, streams = _streams(1.0, 1.0)
    streams[0].launch(_step(1, node=0), ResultSlot(1))
    with pytest.raises(Broken, match="rank 1 is at step 2 while rank 0 is at step 1"):
        streams[1].launch(_step(2, node=1), ResultSlot(1))


def test_who_waits_for_a_rank_that_never_comes_is_named() -> None:
    clock, collectives, streams = _streams(1.0, 1.0, 1.0)
    streams[0].launch(_step(1), ResultSlot(1))
    streams[2].launch(_step(1), ResultSlot(1))
    _run(clock)
    assert collectives.missing() == "step 1: ranks [0, 2] wait for [1]"


def test_a_rank_that_dies_inside_a_collective_ends_it_for_nobody() -> None:
    clock, collectives, streams = _streams(1.0, 1.0)
    for stream in streams:
        stream.launch(_step(1), ResultSlot(1))
    streams[1].die()
    _run(clock)
    assert not streams[0].landed(1)
    assert collectives.missing() == "step 1: ranks [0] wait for [1]"
