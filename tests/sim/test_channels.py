"""Channels, slabs and the step ring in plain memory."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from mstar.simulation.channels import Channel, Delay, VirtualSlab, VirtualSteps
from mstar.simulation.clock import RankClock, VirtualClock
from mstar.simulation.invariants import Broken
from shm.errors import SlabExhausted
from shm.steps import StepLayout

LAYOUT = StepLayout(max_rows=2, max_grants=2, tail_bytes=64, slots=2, readers=1)


def _nothing() -> None:
    pass


def test_events_run_in_order_of_time_and_ties_follow_from_the_seed() -> None:
    def order(seed: int) -> list[int]:
        clock = VirtualClock(Random(seed))
        found: list[int] = []
        for i in range(20):
            clock.at(5, partial(found.append, i))
        clock.at(3, partial(found.append, -1))
        while clock.step():
            pass
        return found

    assert order(1) == order(1) != order(2)
    assert order(1)[0] == order(2)[0] == -1


def test_a_rank_clock_is_off_and_drifts() -> None:
    clock = VirtualClock(Random(0))
    clock.at(1000, _nothing)
    clock.step()
    rank = RankClock(clock, skew_ns=-50, drift=1.5)
    assert (rank.read(), rank.between(200)) == (1450, 1200)


def test_a_channel_keeps_its_order_while_two_channels_overtake_each_other() -> None:
    clock = VirtualClock(Random(3))
    delay = Delay(Random(4), 1000)
    channels: list[Channel[int]] = [Channel(clock, delay, 100, _nothing, _nothing) for _ in range(2)]
    sent, got = [], []
    for i in range(40):
        clock.at(i, lambda i=i: (channels[i % 2].send(i), sent.append(i)))  # type: ignore[misc]
    while clock.step():
        for channel in channels:
            while (record := channel.receive()) is not None:
                got.append(record)
    assert sorted(got) == sent != got
    assert [i for i in got if i % 2] == [i for i in sent if i % 2]


def test_a_full_channel_refuses_and_tells_when_there_is_room() -> None:
    clock = VirtualClock(Random(0))
    told: list[str] = []
    channel: Channel[int] = Channel(clock, Delay(Random(0), 0), 1, _nothing, lambda: told.append("room"))
    assert channel.send(1)
    assert not channel.send(2)
    assert channel.send(3, control=True)
    assert channel.receive() == 1
    while clock.step():
        pass
    assert told == ["room"]
    assert channel.salvage() == [3]


def test_a_block_is_not_read_nor_given_back_after_it_was_given_back() -> None:
    slab = VirtualSlab("prompts", 1)
    handle = slab.lease(8)
    with pytest.raises(SlabExhausted):
        slab.lease(8)
    slab.view(handle)[:] = bytes(8)
    slab.release(handle)
    with pytest.raises(Broken, match="read after"):
        slab.view(handle)
    with pytest.raises(Broken, match="twice"):
        slab.release(handle)


def test_a_step_is_not_overwritten_before_its_reader_is_done() -> None:
    clock = VirtualClock(Random(0))
    ring = VirtualSteps(clock, LAYOUT, _nothing)
    reader = ring.reader(Delay(Random(0), 0), _nothing, lambda seq: False)
    for seq in (1, 2):
        ring.begin(seq)
        ring.commit(seq)
    with pytest.raises(Broken, match="overwrites"):
        ring.begin(3)
    assert reader.peek() is ring.slot(1)
    reader.done()
    ring.begin(3)
    with pytest.raises(Broken, match="step 5 begun after step 2"):
        ring.begin(5)


def test_a_step_becomes_visible_late_and_an_error_is_kept() -> None:
    clock = VirtualClock(Random(0))
    woken: list[int] = []
    ring = VirtualSteps(clock, LAYOUT, _nothing)
    reader = ring.reader(Delay(Random(1), 10_000), lambda: woken.append(clock.now), lambda seq: False)
    ring.begin(1)
    ring.commit(1)
    assert reader.peek() is None
    clock.step()
    assert reader.peek() is not None
    assert woken == [clock.now]
    reader.fail("the first")
    reader.fail("the second")
    assert ring.error(0) == "the first"
