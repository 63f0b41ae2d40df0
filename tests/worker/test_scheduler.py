"""The scheduler, pipeline and executor bookkeeping against a device that withholds landing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.messages.step import HELD, INPUT, StepPlan
from mstar.messages.tokens import LENGTH, STOP
from tests.worker.null_rank import LIMITS, STOP_ID, NullRank, expected

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


@DEPTHS
def test_every_request_gets_its_own_tokens(depth: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth))
    for request in range(1, 21):
        rank.admit(request, prompt=1 + request * 3 % 40, max_tokens=1 + request % 9)
    rank.drain()
    for request in range(1, 21):
        kept = rank.kept[request]
        assert kept.tokens == expected(request, 1 + request * 3 % 40, 1 + request % 9)
        assert kept.finish == [LENGTH]
    rank.check_idle()


@pytest.mark.behaviour("F-26")
@DEPTHS
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
def test_a_budget_of_k_gives_k_tokens(depth: int, budget: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth))
    rank.admit(1, prompt=9, max_tokens=budget)
    rank.drain()
    assert rank.kept[1].tokens == expected(1, 9, budget)
    assert rank.kept[1].finish == [LENGTH]


@DEPTHS
def test_a_row_that_ends_by_its_budget_never_rides_for_nothing(depth: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth))
    for request in range(1, 9):
        rank.admit(request, max_tokens=6)
    rank.drain()
    assert rank.scheduler.statistics().stale_results == 0


@pytest.mark.behaviour("B-06")
@DEPTHS
def test_a_row_that_stopped_rides_at_most_depth_more_steps(depth: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth))
    rank.stops[1] = 3
    rank.admit(1, max_tokens=50, stop_ids=(STOP_ID, 9))
    rank.drain()
    assert rank.kept[1].tokens == [*expected(1, 5, 3), STOP_ID]
    assert rank.kept[1].finish == [STOP]
    assert rank.scheduler.statistics().stale_results == depth
    rank.check_idle()


@DEPTHS
def test_the_same_steps_run_whatever_the_depth_withholds(depth: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth))
    rank.admit(1, prompt=40, max_tokens=5)
    in_flight = []
    rank.on_launch = lambda plan: in_flight.append(rank.scheduler.pipeline.in_flight)
    rank.drain()
    assert max(in_flight) == depth + 1


@pytest.mark.behaviour("B-07")
@pytest.mark.behaviour("F-35")
@DEPTHS
@pytest.mark.parametrize("turns", range(16))
def test_an_abort_at_any_point_frees_everything_once(depth: int, turns: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth))
    rank.admit(1, prompt=70, max_tokens=6)
    rank.admit(2, prompt=6, max_tokens=12)
    for _ in range(turns):
        rank.turn()
    before = len(rank.kept[1].tokens)
    rank.scheduler.abort(1)
    rank.admit(3, prompt=8, max_tokens=5)
    rank.drain()
    assert len(rank.kept[1].tokens) == before
    assert rank.kept[2].tokens == expected(2, 6, 12)
    assert rank.kept[3].tokens == expected(3, 8, 5)
    assert sorted(rank.released) == [1, 2, 3]
    rank.check_idle()


@pytest.mark.behaviour("F-35")
def test_a_slot_is_not_reused_while_a_step_that_names_it_is_in_flight() -> None:
    rank = NullRank(LIMITS._replace(depth=2, slots=2))
    landed: dict[int, int] = {}
    rank.on_launch = lambda plan: landed.update({plan.seq: rank.scheduler.pipeline.landed})
    rank.admit(1, max_tokens=20)
    rank.admit(3, max_tokens=40)
    for _ in range(4):
        rank.turn()
    rank.scheduler.abort(1)
    rank.admit(2, max_tokens=3)
    rank.drain()
    last = max(seq for seq, requests, drops in rank.plans if 1 in requests or 1 in drops)
    first = next(seq for seq, requests, _ in rank.plans if 2 in requests)
    assert landed[first] >= last
    assert first == last + 3  # not later either: depth 2 keeps the slot for two steps more
    assert rank.kept[2].tokens == expected(2, 5, 3)


def test_an_idle_decider_still_drops_what_ended() -> None:
    rank = NullRank()
    rank.admit(1, max_tokens=2)
    rank.drain()
    assert rank.plans[-1][1:] == ((), (1,))
    rank.check_idle()


@DEPTHS
def test_a_pool_too_small_for_all_preempts_the_youngest_and_finishes_all(depth: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth, pages=20, slots=6))
    for request in range(1, 13):
        rank.admit(request, prompt=8, max_tokens=60)
    rank.drain()
    for request in range(1, 13):
        assert rank.kept[request].tokens == expected(request, 8, 60)
    rank.check_idle()


@DEPTHS
def test_a_preempted_row_continues_where_it_was(depth: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth, pages=24, slots=6, horizon_tokens=4))
    for request in range(1, 13):
        rank.admit(request, prompt=8, max_tokens=60)
    rank.drain()
    assert rank.scheduler.statistics().preempted > 0
    for request in range(1, 13):
        assert rank.kept[request].tokens == expected(request, 8, 60)
        assert rank.kept[request].finish == [LENGTH]
    rank.check_idle()


def test_the_oldest_row_is_never_preempted() -> None:
    rank = NullRank(LIMITS._replace(pages=24, slots=6, horizon_tokens=4))
    for request in range(1, 7):
        rank.admit(request, prompt=8, max_tokens=80)
    while not rank.kept[1].finish:
        rank.turn()
        assert all(1 not in drops for _, _, drops in rank.plans)
    rank.drain()


@DEPTHS
@pytest.mark.parametrize("horizon", [1, 4, 16])
@pytest.mark.parametrize("pages", [20, 27, 34])
def test_a_crowded_pool_gives_nobody_a_page_of_another(depth: int, horizon: int, pages: int) -> None:
    """Rows that reach a border together, some with a promise and some without, while others must leave."""
    rank = NullRank(LIMITS._replace(depth=depth, pages=pages, horizon_tokens=horizon))
    owed = {request: (1 + request * 5 % 20, 2 + request * 11 % 54) for request in range(1, 19)}
    for request, (prompt, budget) in owed.items():
        rank.admit(request, prompt=prompt, max_tokens=budget)
        for _ in range(request % 3):
            rank.turn()
    rank.drain(4000)
    for request, (prompt, budget) in owed.items():
        assert rank.kept[request].tokens == expected(request, prompt, budget)
    rank.check_idle()


def test_nobody_overtakes_a_preempted_row_on_its_way_back() -> None:
    rank = NullRank(LIMITS._replace(depth=2, pages=18, slots=4, horizon_tokens=16))
    rank.admit(1, prompt=8, max_tokens=40)
    for _ in range(12):
        rank.turn()
    rank.admit(2, prompt=8, max_tokens=40)
    rank.admit(3, prompt=8, max_tokens=40)
    while not rank.scheduler.statistics().preempted:
        rank.turn()
    assert rank.plans[-1][2] == (3,)
    rank.scheduler.abort(2)  # what was promised to it would do for a newcomer at once
    rank.admit(4, prompt=1, max_tokens=3)
    bound: list[int] = []
    rank.on_launch = lambda plan: bound.extend(bind.request for bind in plan.binds)
    rank.drain()
    assert bound[0] == 3
    assert bound[-1] == 4
    for request, prompt, budget in ((1, 8, 40), (3, 8, 40), (4, 1, 3)):
        assert rank.kept[request].tokens == expected(request, prompt, budget)


def test_rows_get_their_pages_in_rounds_and_never_past_their_budget() -> None:
    rank = NullRank(LIMITS._replace(page_size=8, pages=64))
    rounds: list[int] = []
    held: dict[int, int] = {}

    def watch(plan: StepPlan) -> None:
        if plan.grant_slot.size and not plan.chunk_starts.size:
            rounds.append(plan.seq)
        for slot in plan.grant_slot.tolist():
            held[slot] = held.get(slot, 0) + 1

    rank.on_launch = watch
    for request in range(1, 9):
        rank.admit(request, prompt=3 + request, max_tokens=40 + request)
    rank.drain()
    assert all(after - before >= 8 for before, after in pairwise(rounds))
    assert held == {request - 1: -(-(42 + 2 * request) // 8) for request in range(1, 9)}


def test_a_bind_as_large_as_a_step_can_take_is_bound_and_a_larger_one_refused() -> None:
    """What lies between the two would stand at the head of the line for ever."""
    rank = NullRank(LIMITS._replace(tail_bytes=1024))
    for request, ids in enumerate(range(150, 180), 1):
        rank.admit(request, max_tokens=2, stop_ids=tuple(range(10**6, 10**6 + ids)))
    rank.drain()
    kept = list(rank.kept.values())
    assert all(entry.finish == [LENGTH] or entry.failed[0].status == 400 for entry in kept)
    assert len({bool(entry.failed) for entry in kept}) == 2


@pytest.mark.parametrize(
    ("accepted", "max_tokens", "prompt_tokens"), [(4, 4, 5), (-1, 4, 10), (0, 0, 9), (0, 4, 8), (2, 4, 9)]
)
def test_an_admission_that_contradicts_itself_is_refused_and_the_cell_lives(
    accepted: int, max_tokens: int, prompt_tokens: int
) -> None:
    rank = NullRank()
    rank.admit(1, prompt=9, max_tokens=max_tokens, prompt_tokens=prompt_tokens, accepted=accepted)
    rank.admit(2)
    rank.drain()
    assert rank.kept[1].failed[0].status == 400
    assert rank.kept[2].tokens == expected(2, 5, 4)


@pytest.mark.behaviour("B-12", "F-32")
def test_a_failed_step_ends_its_rows_and_nobody_else() -> None:
    rank = NullRank(LIMITS._replace(depth=2))
    rank.admit(1, max_tokens=30)
    for _ in range(3):
        rank.turn()
    rank.fail_at.add(rank.scheduler.pipeline.next_seq)
    rank.turn()
    rank.admit(2, max_tokens=4)
    rank.drain()
    assert [failure.message for failure in rank.kept[1].failed] == ["planted"]
    assert rank.kept[2].tokens == expected(2, 5, 4)
    rank.check_idle()


def test_a_sequence_that_can_never_fit_is_refused_at_once() -> None:
    rank = NullRank(LIMITS._replace(pages=8))
    rank.admit(1, prompt=20, max_tokens=100)
    rank.admit(2, prompt=200, max_tokens=100)
    assert rank.kept[1].failed[0].status == 400
    assert "8" in rank.kept[1].failed[0].message
    assert rank.kept[2].failed[0].status == 400
    assert rank.released == [1, 2]


def test_a_full_waiting_line_refuses_with_429() -> None:
    rank = NullRank(LIMITS._replace(max_waiting=2))
    for request in (1, 2, 3):
        rank.admit(request)
    assert rank.kept[3].failed[0].status == 429
    rank.drain()
    assert rank.kept[2].tokens == expected(2, 5, 4)


@pytest.mark.behaviour("S0-37")
def test_a_step_never_runs_more_tokens_than_its_budget() -> None:
    rank = NullRank(LIMITS._replace(depth=1))
    sizes: list[int] = []
    rank.on_launch = lambda plan: sizes.append(
        int((plan.chunk_ends - plan.chunk_starts).sum()) + int((plan.chunk_starts < 0).sum())
        if plan.chunk_starts.size
        else plan.request.size
    )
    for request in range(1, 9):
        rank.admit(request, prompt=50, max_tokens=20)
    rank.drain()
    assert max(sizes) <= LIMITS.batch_tokens


@pytest.mark.behaviour("S0-38")
def test_ready_rows_decode_in_every_step_with_room() -> None:
    rank = NullRank(LIMITS._replace(depth=1))
    rank.admit(1, prompt=4, max_tokens=40)
    for _ in range(3):
        rank.turn()
    rank.admit(2, prompt=200, max_tokens=4)
    while rank.node.slots.ride[0]:
        rank.turn()
    seqs = [seq for seq, requests, _ in rank.plans if 1 in requests]
    assert seqs == list(range(seqs[0], seqs[0] + 40))


def test_a_row_stops_at_its_own_stop_ids_and_at_no_other_rows() -> None:
    rank = NullRank()
    rank.stops[1] = rank.stops[2] = 2
    rank.admit(1, max_tokens=30, stop_ids=(900001, 900002, 900003, 900004, 900005, STOP_ID))
    rank.admit(2, max_tokens=6, stop_ids=(900001,))
    rank.drain()
    assert rank.kept[1].finish == [STOP]
    assert rank.kept[2].finish == [LENGTH]


def test_a_stop_id_on_the_last_budgeted_token_is_a_stop() -> None:
    rank = NullRank()
    rank.stops[1] = 3
    rank.admit(1, max_tokens=4, stop_ids=(STOP_ID,))
    rank.drain()
    assert rank.kept[1].finish == [STOP]


_event = st.one_of(
    st.tuples(st.just("admit"), st.integers(1, 60), st.integers(1, 40)),
    st.tuples(st.just("abort"), st.integers(1, 40), st.just(0)),
    st.tuples(st.just("turn"), st.integers(1, 12), st.just(0)),
    st.tuples(st.just("fail"), st.just(0), st.just(0)),
)


@pytest.mark.behaviour("F-19", "F-35", "F-36")
@settings(max_examples=120, deadline=None)
@given(
    depth=st.integers(0, 2),
    room=st.integers(104, 256),
    page_size=st.sampled_from([1, 4, 16]),
    horizon=st.sampled_from([1, 4, 32]),
    events=st.lists(_event, min_size=1, max_size=60),
    stops=st.dictionaries(st.integers(1, 40), st.integers(0, 30), max_size=12),
)
def test_random_faults_leave_every_request_with_one_end_and_every_page_free(
    depth: int,
    room: int,
    page_size: int,
    horizon: int,
    events: list[tuple[str, int, int]],
    stops: dict[int, int],
) -> None:
    limits = LIMITS._replace(depth=depth, slots=5, page_size=page_size, horizon_tokens=horizon)
    rank = NullRank(limits._replace(pages=limits.pages_of(room)))
    rank.stops = stops
    aborted: set[int] = set()
    budgets: dict[int, tuple[int, int]] = {}
    for kind, first, second in events:
        if kind == "admit":
            request = len(budgets) + 1
            budgets[request] = (first, second)
            rank.admit(request, prompt=first, max_tokens=second, stop_ids=(STOP_ID,))
        elif kind == "abort":
            ended = rank.kept.get(first)
            if ended is None or not (ended.finish or ended.failed):
                aborted.add(first)  # also one that is yet to come
            rank.scheduler.abort(first)
        elif kind == "turn":
            for _ in range(first):
                rank.turn()
        else:
            rank.fail_at.add(rank.scheduler.pipeline.next_seq)
    rank.drain()
    for request, (prompt, budget) in budgets.items():
        kept = rank.kept[request]
        owed = expected(request, prompt, budget)
        stop = stops.get(request)
        if stop is not None and stop < budget:
            owed = [*owed[:stop], STOP_ID]
        assert kept.tokens == owed[: len(kept.tokens)]
        assert len(kept.finish) + len(kept.failed) == (0 if request in aborted else 1)
        if kept.finish:
            assert kept.tokens == owed
    assert sorted(rank.released) == sorted(budgets)
    rank.check_idle()


def test_slots_are_taken_lowest_first_so_that_plans_stay_short() -> None:
    rank = NullRank()
    for request in range(1, 6):
        rank.admit(request, max_tokens=2 if request < 5 else 30)
    rank.drain()
    rank.admit(9, max_tokens=2)
    rank.turn()
    assert np.flatnonzero(rank.node.slots.owner >= 0).tolist() == [0]


@pytest.mark.behaviour("S0-33")
@DEPTHS
def test_only_the_final_chunk_gives_a_token_and_gives_it_once(depth: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth))
    samples: list[tuple[int, int]] = []

    def watch(plan: StepPlan) -> None:
        if plan.chunk_starts.size:
            samples.append((int(plan.chunk_ends[-1]), int(plan.samples[-1])))

    rank.on_launch = watch
    rank.admit(1, prompt=100, max_tokens=3)
    rank.drain()
    assert [end for end, _ in samples] == [32, 64, 96, 100]
    assert [count for _, count in samples] == [0, 0, 0, 1]
    assert rank.kept[1].tokens == expected(1, 100, 3)


@pytest.mark.behaviour("S0-17")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_mid_prefill_runs_on_from_its_held_input_while_a_step_is_in_flight(depth: int) -> None:
    rank = NullRank(LIMITS._replace(depth=depth))
    seen: list[tuple[int, int, int, int]] = []

    def watch(plan: StepPlan) -> None:
        for row in (plan.request == 2).nonzero()[0].tolist():
            in_flight = rank.scheduler.pipeline.in_flight
            seen.append((in_flight, int(plan.source[row]), int(plan.counter[row]), int(plan.samples[row])))

    rank.on_launch = watch
    rank.admit(1, prompt=4, max_tokens=30)
    for _ in range(4):
        rank.turn()
    rank.admit(2, prompt=90, max_tokens=2)
    rank.drain()
    chunks = seen[:3]
    assert all(in_flight == depth + 1 for in_flight, *_ in chunks)  # the step itself and those before it
    assert [source for _, source, _, _ in chunks] == [INPUT, HELD, HELD]
    counters = [counter for _, _, counter, _ in chunks]
    assert counters == [0, 31, 62]  # tokens, never chunks; no iteration is counted for a step in flight
    assert rank.kept[2].tokens == expected(2, 90, 2)


@pytest.mark.behaviour("B-04")
def test_a_chunk_that_finds_no_room_in_the_record_leaves_its_row_as_it_was() -> None:
    """The record holds the pages of one prompt at a time: the other row waits, and loses nothing."""
    rank = NullRank(LIMITS._replace(page_size=1, pages=300, batch_tokens=256, max_seq_len=256))
    widest = rank.steps.begin(1).grants.shape[1]
    rank.steps.narrow(140)
    assert widest > 140
    chunks: list[list[tuple[int, int, int]]] = []

    def watch(plan: StepPlan) -> None:
        columns = (plan.request, plan.chunk_starts, plan.chunk_ends)
        if plan.chunk_starts.size:
            chunks.append([row for row in zip(*(c.tolist() for c in columns), strict=True) if row[1] >= 0])

    rank.on_launch = watch
    rank.admit(1, prompt=120, max_tokens=2)
    rank.admit(2, prompt=120, max_tokens=2)
    rank.drain()
    assert chunks[:2] == [[(1, 0, 120)], [(2, 0, 120)]]
    for request in (1, 2):
        assert rank.kept[request].tokens == expected(request, 120, 2)
    rank.check_idle()


@pytest.mark.behaviour("B-04")
def test_a_preempted_row_that_finds_no_block_for_its_tokens_waits_in_its_place() -> None:
    rank = NullRank(LIMITS._replace(pages=24, slots=6, horizon_tokens=4))
    rank.replays.limit(0)
    for request in range(1, 7):
        rank.admit(request, prompt=8, max_tokens=60)
    for _ in range(200):
        rank.turn()
    assert rank.scheduler.statistics().preempted > 0
    rank.replays.limit(64)
    rank.drain()
    for request in range(1, 7):
        assert rank.kept[request].tokens == expected(request, 8, 60)
    rank.check_idle()


@pytest.mark.behaviour("S0-28")
@pytest.mark.parametrize("rows", [40, 64])
def test_a_short_prompt_that_comes_while_many_rows_decode_runs_in_the_next_step(rows: int) -> None:
    rank = NullRank(LIMITS._replace(slots=rows + 1, pages=4096, batch_tokens=rows + 32, depth=1))
    for request in range(1, rows + 1):
        rank.admit(request, prompt=4, max_tokens=100)
    while rank.scheduler.statistics().generated_tokens < 3 * rows:
        rank.turn()
    before = rank.scheduler.pipeline.planned
    rank.admit(rows + 1, prompt=20, max_tokens=2)
    while not rank.kept[rows + 1].tokens:
        rank.turn()
    first = next(seq for seq, requests, _ in rank.plans if rows + 1 in requests)
    assert first == before + 1
    assert rank.scheduler.pipeline.landed <= first + 1
    rank.drain()


@pytest.mark.behaviour("B-12")
def test_a_row_that_cannot_be_prepared_fails_alone() -> None:
    rank = NullRank(LIMITS._replace(depth=1))
    rank.refuse[2] = "no such token"
    for request in (1, 2, 3):
        rank.admit(request, prompt=6, max_tokens=8)
    rank.drain()
    assert [failure.message for failure in rank.kept[2].failed] == ["no such token"]
    assert rank.kept[2].tokens == []
    for request in (1, 3):
        assert rank.kept[request].tokens == expected(request, 6, 8)
    rank.check_idle()


@pytest.mark.behaviour("B-12")
def test_a_row_that_cannot_be_prepared_fails_even_when_its_step_does() -> None:
    rank = NullRank(LIMITS._replace(slots=12, pages=1024, batch_tokens=32))
    rank.refuse[9] = "no such token"
    for request in range(1, 9):
        rank.admit(request, prompt=200, max_tokens=2)
    rank.turn()
    rank.turn()
    rank.admit(9, prompt=6, max_tokens=3)
    rank.fail_at.add(rank.scheduler.pipeline.next_seq)
    rank.drain()
    assert [failure.message for failure in rank.kept[9].failed] == ["no such token"]
    assert rank.kept[9].tokens == []
    rank.check_idle()
