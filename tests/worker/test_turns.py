"""Several nodes on one decider, and the walks of one node, take turns in one sequence of steps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mstar.messages.prefix import page_digests
from mstar.messages.request import Admit, Sampling
from mstar.messages.step import StepPlan
from mstar.messages.tokens import RowFailed
from mstar.worker.outcome import StepResult
from mstar.worker.scheduler import DECODE, MIXED, PREFILL, Limits, MicroScheduler
from shm.slab import SlabHandle
from shm.steps import StepLayout
from tests.worker.null_rank import LIMITS, NullRank, Replays, Steps, expected


class Decider:
    """A scheduler of several nodes whose steps land ``depth`` steps after they were planned."""

    def __init__(self, *nodes: Limits) -> None:
        self.steps = Steps(StepLayout(16, 256, 1 << 14, 4, 0))
        self.scheduler = MicroScheduler(nodes, self.steps.begin, Replays())
        self.depth = nodes[0].depth
        self.plans: list[tuple[int, int, list[int]]] = []
        self.failed: list[RowFailed] = []

    def admit(self, request: int, node: int, prompt: int = 5, max_tokens: int = 4) -> None:
        tokens = np.arange(prompt, dtype=np.int32)
        digests = page_digests(tokens, LIMITS.page_size, b"")
        handle = SlabHandle(0, 0, tokens.nbytes)
        message = Admit(request, 0, handle, prompt, max_tokens, Sampling(), node=node)
        self.scheduler.admit(message, tokens, digests, lambda: None)
        self.failed += self.scheduler.take_refusals()

    def turn(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append((plan.node, plan.walk, plan.request.tolist()))
        pipeline = self.scheduler.pipeline
        if pipeline.in_flight and (plan is None or pipeline.in_flight > self.depth):
            self.scheduler.land(pipeline.oldest, StepResult(np.full(16, 50, np.int32)))
            self.scheduler.read(pipeline.landed)
        return plan

    def drain(self) -> None:
        while not self.scheduler.idle:
            self.turn()


@pytest.mark.behaviour("B-01")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nodes_with_work_take_turns(depth: int) -> None:
    limits = LIMITS._replace(depth=depth)
    decider = Decider(limits, limits, limits)
    for request in range(1, 10):
        decider.admit(request, request % 3, max_tokens=12)
    for _ in range(30):
        decider.turn()
    nodes = [node for node, _, _ in decider.plans]
    assert all(len({*nodes[at : at + 3]}) == 3 for at in range(27 - 3))
    decider.drain()


@pytest.mark.behaviour("B-01")
def test_a_node_that_had_nothing_to_do_is_next_when_it_has() -> None:
    decider = Decider(LIMITS, LIMITS)
    decider.admit(1, 0, max_tokens=40)
    for _ in range(6):
        decider.turn()
    decider.admit(2, 1, max_tokens=40)
    decider.turn()
    assert decider.plans[-1][0] == 1


def test_the_same_node_runs_ahead_only_when_nothing_else_is_ready() -> None:
    decider = Decider(LIMITS, LIMITS)
    decider.admit(1, 0, max_tokens=12)
    decider.admit(2, 1, max_tokens=12)
    decider.drain()
    both = [node for node, _, requests in decider.plans if requests][:20]
    assert all(before != after for before, after in pairwise(both))


def test_nodes_have_slots_and_pages_of_their_own() -> None:
    decider = Decider(LIMITS._replace(slots=2), LIMITS._replace(slots=2, pages=8))
    for request in range(1, 9):
        decider.admit(request, request % 2, prompt=9)
    decider.drain()
    assert decider.scheduler.statistics().finished == 8
    for node in decider.scheduler.nodes:
        pages = node.ledger.statistics()
        assert pages.free + pages.cached == pages.total


def test_a_request_for_a_node_that_is_not_there_is_refused_by_its_number() -> None:
    decider = Decider(LIMITS, LIMITS)
    decider.admit(1, 2)
    assert decider.failed[0].status == 400
    assert "node 2" in decider.failed[0].message
    assert "0 to 1" in decider.failed[0].message


@pytest.mark.behaviour("B-01", "B-03")
def test_walks_that_may_not_share_a_step_take_turns() -> None:
    rank = NullRank(LIMITS._replace(mixes=False))
    walks: list[int] = []
    rank.on_launch = lambda plan: walks.append(plan.walk)
    rank.admit(1, prompt=4, max_tokens=30)
    for _ in range(3):
        rank.turn()
    rank.admit(2, prompt=200, max_tokens=3)
    rank.drain()
    assert MIXED not in walks
    start = walks.index(PREFILL, 1)
    assert walks[start : start + 10] == [PREFILL, DECODE] * 5
    for request, prompt, budget in ((1, 4, 30), (2, 200, 3)):
        assert rank.kept[request].tokens == expected(request, prompt, budget)


@pytest.mark.behaviour("S0-39")
def test_decodes_never_wait_for_a_chunk_where_walks_share_a_step() -> None:
    for depth in (0, 1, 2):
        rank = NullRank(LIMITS._replace(depth=depth))
        steps: list[tuple[int, bool]] = []
        rank.on_launch = lambda plan, steps=steps: steps.append((plan.walk, 1 in plan.request))  # type: ignore[misc]
        rank.admit(1, prompt=4, max_tokens=60)
        for _ in range(3):
            rank.turn()
        rank.admit(2, prompt=200, max_tokens=3)
        rank.drain()
        chunked = [decodes for walk, decodes in steps[2:] if walk != DECODE]
        assert chunked.count(False) == 0


@pytest.mark.behaviour("S4-30")
def test_with_chunking_off_prompts_run_whole_and_the_first_even_over_the_budget() -> None:
    rank = NullRank(LIMITS._replace(chunked=False))
    chunks: list[tuple[int, int, int]] = []

    def watch(plan: StepPlan) -> None:
        columns = (plan.request, plan.chunk_starts, plan.chunk_ends)
        rows = zip(*(column[: plan.chunk_starts.size].tolist() for column in columns), strict=True)
        chunks.extend(row for row in rows if row[1] >= 0)

    rank.on_launch = watch
    for request, prompt in ((1, 20), (2, 10), (3, 100), (4, 5)):
        rank.admit(request, prompt=prompt)
    rank.drain()
    assert sorted(chunks) == [(1, 0, 20), (2, 0, 10), (3, 0, 100), (4, 0, 5)]
    for request, prompt in ((1, 20), (2, 10), (3, 100), (4, 5)):
        assert rank.kept[request].tokens == expected(request, prompt, 4)


@pytest.mark.behaviour("S4-20")
def test_a_cap_on_prefill_holds_beside_decodes_and_not_without_them() -> None:
    rank = NullRank(LIMITS._replace(prefill_cap=8))
    sizes: dict[bool, set[int]] = {True: set(), False: set()}

    def watch(plan: StepPlan) -> None:
        if plan.chunk_starts.size:
            decodes = bool(np.count_nonzero(plan.chunk_starts < 0))
            sizes[decodes].add(int((plan.chunk_ends - plan.chunk_starts).sum()))

    rank.on_launch = watch
    rank.admit(1, prompt=100, max_tokens=40)
    for _ in range(8):
        rank.turn()
    rank.admit(2, prompt=100, max_tokens=3)
    rank.drain()
    assert max(sizes[True]) == 8
    assert max(sizes[False]) == LIMITS.batch_tokens


@pytest.mark.behaviour("F-16")
def test_a_short_prompt_behind_many_long_ones_runs_as_soon_as_it_has_a_slot() -> None:
    rank = NullRank(LIMITS._replace(slots=8, pages=1024, batch_tokens=16))
    for request in range(1, 8):
        rank.admit(request, prompt=200, max_tokens=2)
    for _ in range(4):
        rank.turn()
    rank.admit(8, prompt=3, max_tokens=2)
    turns = 0
    while not rank.kept[8].finish:
        rank.turn()
        turns += 1
    assert turns <= 6
    rank.drain()


@pytest.mark.behaviour("F-16")
def test_a_target_itl_makes_steps_smaller_while_rows_decode() -> None:
    """The device takes 1 ms a step and 0.1 ms a token: 2 ms leave room for ten tokens."""
    limits = LIMITS._replace(target_itl_ns=2_000_000, batch_tokens=64, min_chunk_tokens=4, slots=4)
    rank = NullRank(limits)
    now = 0

    def tokens(plan: StepPlan) -> int:
        chunked = plan.chunk_starts >= 0
        return plan.slot.size - chunked.sum() + int((plan.chunk_ends - plan.chunk_starts)[chunked].sum())

    sizes: list[int] = []

    def run(plan: StepPlan) -> None:
        nonlocal now
        size = tokens(plan) if plan.chunk_starts.size else plan.slot.size
        now += 1_000_000 + 100_000 * size
        if plan.walk == MIXED:
            sizes.append(size)

    forward = rank.device._forward
    rank.device._forward = lambda plan, results: (run(plan), forward(plan, results))[1]
    rank.device._clock = lambda: now
    rank.admit(1, prompt=4, max_tokens=200)
    for request in range(2, 12):
        rank.admit(request, prompt=230, max_tokens=2)
    rank.drain()
    assert len(sizes) > 100
    late = sizes[len(sizes) // 2 :]
    assert np.quantile(late, 0.95) <= 10
    assert max(late) <= 15
    assert np.mean(late) >= 6


@pytest.mark.behaviour("S4-27")
@pytest.mark.parametrize("budget", [4, 16, 64])
def test_a_prompt_beside_few_decodes_runs_whatever_the_floor(budget: int) -> None:
    """A floor as large as the step would keep it waiting until nobody decodes."""
    rank = NullRank(LIMITS._replace(slots=4, batch_tokens=budget, min_chunk_tokens=64, max_seq_len=256))
    rank.admit(1, prompt=3, max_tokens=150)
    for _ in range(4):
        rank.turn()
    rank.admit(2, prompt=60, max_tokens=2)
    while not rank.kept[2].tokens:
        rank.turn()
    assert not rank.kept[1].finish
    rank.drain()


@pytest.mark.behaviour("S4-20", "S4-27")
def test_a_cap_on_prefill_below_the_floor_is_what_a_chunk_has() -> None:
    rank = NullRank(LIMITS._replace(prefill_cap=8, min_chunk_tokens=16, batch_tokens=64))
    rank.admit(1, prompt=4, max_tokens=200)
    for _ in range(4):
        rank.turn()
    rank.admit(2, prompt=64, max_tokens=2)
    for _ in range(12):
        rank.turn()
    assert rank.kept[2].finish
    rank.drain()


@pytest.mark.behaviour("B-02")
def test_a_budget_of_a_token_for_every_slot_leaves_no_token_unused_while_a_prompt_waits() -> None:
    rank = NullRank(LIMITS._replace(slots=16, batch_tokens=16, min_chunk_tokens=16, pages=512))
    sizes: list[tuple[int, int]] = []

    def watch(plan: StepPlan) -> None:
        waiting = len(rank.node._prefill)
        chunks = plan.chunk_starts >= 0
        tokens = plan.slot.size - int(chunks.sum())
        tokens += int((plan.chunk_ends - plan.chunk_starts)[chunks].sum()) if plan.chunk_starts.size else 0
        sizes.append((tokens, waiting))

    rank.on_launch = watch
    for request in range(1, 17):
        rank.admit(request, prompt=4, max_tokens=50)
    rank.drain()
    assert all(tokens == 16 for tokens, waiting in sizes if waiting)


@pytest.mark.behaviour("F-16")
def test_a_short_prompt_does_not_wait_for_a_long_one_whose_floor_is_all_there_is() -> None:
    """A target that bare decodes nearly use up leaves one floor a step."""
    rank = NullRank(LIMITS._replace(slots=4, prefill_cap=4, min_chunk_tokens=4))
    rank.admit(1, prompt=4, max_tokens=200)
    for _ in range(4):
        rank.turn()
    rank.admit(2, prompt=200, max_tokens=2)
    for _ in range(3):
        rank.turn()
    rank.admit(3, prompt=6, max_tokens=2)
    turns = 0
    while not rank.kept[3].tokens:
        rank.turn()
        turns += 1
    assert turns <= 6
    while not rank.kept[2].tokens:
        rank.turn()
    assert not rank.kept[1].finish
    rank.drain()
