"""What the simulated house does with requests, and with what goes wrong."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mstar.messages.tokens import ERROR, LENGTH, STOP
from mstar.simulation.faults import Death, Faults, Hog, OutOfMemory, RankFaults
from mstar.simulation.invariants import Broken
from mstar.simulation.oracle import MASK_BYTES
from tests.sim.worlds import LIMITS, ends, tokens_of, world

EVERYBODY = [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (4, 1)]


@pytest.mark.parametrize(("ranks", "depth"), EVERYBODY)
@pytest.mark.parametrize("inline", [False, True])
def test_every_request_gets_its_tokens_and_one_end(ranks: int, depth: int, inline: bool) -> None:
    house = world(LIMITS._replace(depth=depth), ranks=ranks, inline=inline)
    long = house.submit(0, 40, 6)
    short = [house.submit(5_000 * i, 3, 5) for i in range(6)]
    stopped = house.submit(0, 9, 9, stop_at=4)
    texted = house.submit(0, 9, 9, text_at=2)
    outcome = house.run()
    assert ends(outcome) == {long: LENGTH, **dict.fromkeys(short, LENGTH), stopped: STOP, texted: STOP}
    assert tokens_of(outcome, stopped) == 4
    assert tokens_of(outcome, texted) == 2
    assert tokens_of(outcome, long) == 6


def test_the_same_seed_gives_the_same_run() -> None:
    runs = []
    for seed in (3, 3, 4):
        house = world(ranks=2, seed=seed)
        for i in range(5):
            house.submit(i, 10 + i, 5)
        runs.append(house.run())
    assert runs[0].events == runs[1].events
    assert runs[0].steps == runs[1].steps
    assert runs[0].events != runs[2].events


@pytest.mark.behaviour("F-04")
def test_clocks_that_are_seconds_apart_change_no_step() -> None:
    steps = []
    for skew in (0, 7_000_000_000):
        faults = Faults(ranks=tuple(RankFaults(skew_ns=skew * rank) for rank in range(3)))
        house = world(LIMITS._replace(target_itl_ns=15_000), ranks=3, faults=faults)
        for i in range(6):
            house.submit(i * 20_000, 20, 6)
        steps.append(house.run().steps)
    assert steps[0] == steps[1]


@pytest.mark.behaviour("S0-95", "S0-24")
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_prompt_that_is_resent_skips_its_cached_pages_on_every_rank(ranks: int) -> None:
    house = world(ranks=ranks)
    prompt = house.oracle.foresee(0, np.arange(33, dtype=np.int32), 1).tokens[:33]
    house.submit(0, prompt, 4)
    house.submit(10_000_000, prompt, 4)
    steps = house.run().steps
    assert sum(step.chunk_tokens for step in steps) == 33 + 1
    assert house.statistics().scheduler.cached_tokens == 32


@pytest.mark.behaviour("S0-96", "S0-38")
def test_decodes_ride_beside_every_chunk_of_a_long_prompt() -> None:
    house = world(ranks=2)
    house.submit(0, 2, 30)
    house.submit(40_000, 60, 1)
    chunked = [step for step in house.run().steps if step.chunk_tokens]
    assert len(chunked) >= 6
    assert all(step.decodes == 1 for step in chunked[1:])


@pytest.mark.behaviour("B-01", "S0-39")
def test_two_nodes_with_work_take_turns_step_by_step() -> None:
    house = world((LIMITS, LIMITS), ranks=2)
    for node in (0, 1):
        house.submit(0, 3, 12, node=node)
        house.submit(0, 40, 2, node=node)
    steps = house.run().steps
    both = steps[2:20]
    assert all(first.node != second.node for first, second in pairwise(both))


@pytest.mark.behaviour("S0-02")
def test_a_node_that_is_not_chunked_runs_its_prompts_whole() -> None:
    whole = LIMITS._replace(chunked=False)
    house = world((LIMITS, whole), ranks=2, groups=((0, 1), (0, 1)))
    house.submit(0, 50, 2, node=0)
    house.submit(0, 50, 2, node=1)
    steps = house.run().steps
    assert [step.chunk_tokens for step in steps if step.node == 1 and step.chunk_tokens] == [50]
    assert max(step.chunk_tokens for step in steps if step.node == 0) == LIMITS.batch_tokens


@pytest.mark.behaviour("S0-27", "S0-30", "F-06", "F-35", "B-07", "B-08")
@pytest.mark.parametrize(("ranks", "depth"), [(2, 0), (2, 1), (4, 2)])
def test_an_abort_at_any_time_leaves_every_rank_clean(ranks: int, depth: int) -> None:
    leave_ns = 1
    while True:
        house = world(LIMITS._replace(depth=depth), ranks=ranks)
        victim, other = house.submit(0, 40, 5), house.submit(0, 6, 8)
        house.disconnect(leave_ns, victim)
        after = house.submit(leave_ns, 20, 2)
        outcome = house.run()  # raises unless everything is back
        assert ends(outcome)[other] == ends(outcome)[after] == LENGTH
        if tokens_of(outcome, victim) == 5:
            break
        leave_ns += 1_500
    assert leave_ns > 60_000


@pytest.mark.behaviour("B-09")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("inline", [False, True])
def test_a_rank_may_die_at_every_event_and_the_next_request_is_served(rank: int, inline: bool) -> None:
    event = 0
    while True:
        faults = Faults(deaths=(Death(event, rank, 40_000),), restart_ns=100_000)
        house = world(ranks=2, inline=inline, faults=faults)
        house.submit(0, 20, 4)
        house.submit(0, 5, 4, count=2)
        later = house.submit(1_000_000, 5, 3)
        outcome = house.run()
        assert len(ends(outcome)) == 4
        assert outcome.statistics.restarts == 1
        if ends(outcome)[later] == ERROR:
            break  # it hit the later one
        event += 3
    assert event > 60


def test_without_a_restart_a_dead_rank_is_a_deadlock_that_names_who_waits() -> None:
    house = world(ranks=3, faults=Faults(deaths=(Death(40, 2),), restart_ns=-1))
    house.submit(0, 30, 30)
    with pytest.raises(Broken, match=r"deadlock: .*ranks \[0, 1\] wait for \[2\]"):
        house.run()


@pytest.mark.behaviour("B-12")
def test_a_forward_without_memory_fails_its_batch_on_one_rank_and_the_cell_on_more() -> None:
    for ranks, restarts in ((1, 0), (2, 1)):
        house = world(ranks=ranks, faults=Faults(memory=(OutOfMemory(2, ranks - 1),), restart_ns=0))
        hit = house.submit(0, 20, 4)
        after = house.submit(1_000_000, 5, 3)
        outcome = house.run()
        assert ends(outcome) == {hit: ERROR, after: LENGTH}
        assert outcome.statistics.restarts == restarts


@pytest.mark.behaviour("B-12")
def test_a_row_that_the_model_refuses_fails_alone() -> None:
    house = world(ranks=2)
    refused, other = house.submit(0, 20, 4, refused=True), house.submit(0, 20, 4)
    assert ends(house.run()) == {refused: ERROR, other: LENGTH}


@pytest.mark.behaviour("F-05")
def test_a_bit_that_flips_in_the_ring_ends_the_cell_before_a_row_is_touched() -> None:
    house = world(ranks=2, faults=Faults(bent=((3, 1),), restart_ns=0))
    hit = house.submit(0, 30, 9)
    after = house.submit(1_000_000, 5, 3)
    outcome = house.run()
    assert ends(outcome) == {hit: ERROR, after: LENGTH}
    assert outcome.statistics.restarts == 1


@pytest.mark.behaviour("F-20", "S0-21", "S0-39")
def test_a_tight_pool_preempts_and_everybody_finishes() -> None:
    tight = LIMITS._replace(pages=17, horizon_tokens=1, slots=8)
    hogs = (Hog(at_ns=100_000, for_ns=200_000, node=0, pages=6),)
    for ranks in (1, 2):
        house = world(tight, ranks=ranks, faults=Faults(hogs=hogs))
        asked = [house.submit(0, 8, 40) for _ in range(6)]
        outcome = house.run()
        assert ends(outcome) == dict.fromkeys(asked, LENGTH)
        assert outcome.statistics.scheduler.preempted > 0


def test_what_does_not_fit_is_refused_and_the_rest_is_served() -> None:
    house = world(LIMITS._replace(max_waiting=2), ranks=2, channel_records=2, prompts=3)
    asked = [house.submit(0, 20, 4) for _ in range(12)]
    found = ends(house.run())
    assert set(found) == set(asked)
    assert {ERROR, LENGTH} == set(found.values())


def test_a_run_can_stop_on_the_way_and_go_on() -> None:
    house = world()
    house.submit(0, 20, 10)
    assert not house.run(until_ns=1).steps
    assert len(house.run().events) == 10


def test_a_world_with_too_few_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="2 nodes need as many groups"):
        world((LIMITS, LIMITS), groups=((0,),))


@pytest.mark.parametrize(("ranks", "depth"), EVERYBODY)
@pytest.mark.parametrize("inline", [False, True])
def test_rows_that_draw_late_get_their_tokens_under_their_masks(ranks: int, depth: int, inline: bool) -> None:
    house = world(LIMITS._replace(depth=depth, mask_bytes=MASK_BYTES), ranks=ranks, inline=inline)
    late = [house.submit(1_000 * i, 10, 6, late=True) for i in range(5)]
    plain = house.submit(0, 20, 6)
    assert ends(house.run()) == dict.fromkeys([*late, plain], LENGTH)
