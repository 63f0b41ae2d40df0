"""The simulator's own books: each rule, broken by plans written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mstar.messages.tokens import ERROR, LENGTH, STOP, RowFailed, TokenBatch
from mstar.simulation.invariants import Broken, ClientAudit, RankAudit
from mstar.simulation.oracle import Foreseen, Oracle
from mstar.simulation.plan_audit import PlanAudit, Work
from mstar.worker.limits import Limits
from tests.messages.plans import Chunk, Decode, Step, bind, new_slot, pages, write

LIMITS = Limits(
    slots=4,
    max_seq_len=64,
    pages=8,
    page_size=16,
    batch_tokens=32,
    min_chunk_tokens=4,
    depth=1,
    max_waiting=8,
)


def _start(request: int, slot: int, length: int, *ids: int, start: int = 0, cap: int = 9) -> Step:
    return Step(
        rows=(Chunk(slot, request, start, length, length, counter=0),),
        binds=(bind(request, slot, length, cap),),
        grants=pages(slot, *ids),
    )


def _decode(counter: int) -> Step:
    return Step(rows=(Decode(0, 1, counter),))


def _play(*steps: Step | int, limits: Limits = LIMITS, seqs: tuple[int, ...] = ()) -> PlanAudit:
    """Plan the steps one after the other; a number says how far they have landed by then."""
    audit = PlanAudit([limits])
    seq = 0
    for step in steps:
        if isinstance(step, int):
            audit.land(step, None, ())
            continue
        seq += 1
        audit.plan(write(seqs[seq - 1] if seqs else seq, step, new_slot()), 0, False)
    return audit


FIRST = _start(1, 0, 20, 0, 1)
BROKEN: dict[str, tuple[str, tuple[Step | int, ...]]] = {
    "more than depth + 1 in flight": ("depth", (FIRST, _decode(1), _decode(2))),
    "a drop of nobody": ("drop", (Step(drops=(5,)),)),
    "a row of another request": ("owner", (FIRST, Step(rows=(Decode(0, 2, 1),)))),
    "a slot bound before it has landed": ("slot", (FIRST, Step(drops=(1,)), 1, _start(2, 0, 20, 2, 3))),
    "a request bound twice": ("slot", (FIRST, _start(1, 1, 20, 2, 3))),
    "a token skipped": ("counter", (FIRST, _decode(2))),
    "a token past the cap": ("counter", (_start(1, 0, 20, 0, 1, cap=1), _decode(1))),
    "a chunk left out": (
        "chunk",
        (
            Step(rows=(Chunk(0, 1, 0, 8, 40),), binds=(bind(1, 0, 40),), grants=pages(0, 0)),
            Step(rows=(Chunk(0, 1, 16, 32, 40),), grants=pages(0, 1)),
        ),
    ),
    "a page that is held": ("page", (FIRST, _start(2, 1, 20, 1, 2))),
    "a page before its last step has landed": ("page", (FIRST, Step(drops=(1,)), 1, _start(2, 1, 20, 0, 2))),
    "a token without a page": ("page", (_start(1, 0, 20, 0),)),
    "a lease of what has not landed": ("lease", (FIRST, _start(2, 1, 20, 0, 2, start=16))),
    "a lease that ends inside a page": ("lease", (FIRST, 1, _start(2, 1, 20, 0, 2, start=10))),
    "a page that does not exist": ("grant", (_start(1, 0, 20, 0, 8),)),
    "a step over its budget": ("budget", (_start(1, 0, 33, 0, 1, 2),)),
    "a ready row left out": ("left out", (FIRST, _start(2, 1, 8, 2))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_plan_that_breaks_a_rule_is_told(name: str) -> None:
    rule, steps = BROKEN[name]
    with pytest.raises(Broken) as caught:
        _play(*steps)
    assert caught.value.rule == rule


def test_a_plan_out_of_order_is_told() -> None:
    with pytest.raises(Broken, match="step 3 follows step 1"):
        _play(FIRST, Step(), seqs=(1, 3))


@pytest.mark.parametrize(
    ("limits", "rule"), [(LIMITS._replace(mixes=False), "mix"), (LIMITS._replace(prefill_cap=4), "budget")]
)
def test_what_a_node_does_not_allow_beside_decodes_is_told(limits: Limits, rule: str) -> None:
    beside = Step(rows=(Decode(0, 1, 1), Chunk(1, 2, 0, 8, 8)), binds=(bind(2, 1, 8),), grants=pages(1, 2))
    _play(FIRST, beside)
    with pytest.raises(Broken) as caught:
        _play(FIRST, beside, limits=limits)
    assert caught.value.rule == rule


def test_a_prompt_that_runs_whole_may_exceed_the_budget_alone() -> None:
    _play(_start(1, 0, 40, 0, 1, 2), limits=LIMITS._replace(chunked=False))


def test_a_lease_of_landed_pages_is_right_and_its_pages_are_not_written() -> None:
    again = _start(2, 1, 20, 0, 2, start=16)
    beside = again._replace(rows=(Decode(0, 1, 1), *again.rows))
    audit = _play(FIRST, 1, beside)
    with pytest.raises(Broken, match="idle"):
        audit.idle()


def test_the_work_of_a_plan_is_told() -> None:
    audit = PlanAudit([LIMITS])
    assert audit.plan(write(1, FIRST, new_slot()), 0, False) == Work(0, 20, 1, 400)
    assert audit.plan(write(2, Step(rows=(Decode(0, 1, 1),)), new_slot()), 0, False) == Work(1, 0, 1, 21)


@pytest.mark.parametrize("how", ["aborted", "stopped", "failed"])
def test_who_is_over_leaves_with_the_next_plan(how: str) -> None:
    audit = _play(FIRST)
    if how == "aborted":
        audit.over(1)
    elif how == "stopped":
        one = np.array([1])
        audit.land(1, TokenBatch(one, one, one, one, np.array([STOP], np.int8)), ())
    else:
        audit.land(1, None, (RowFailed(1, 0, "why"),))
    with pytest.raises(Broken, match="does not drop request 1"):
        audit.plan(write(2, Step(rows=(Decode(0, 1, 1),)), new_slot()), 0, False)


def test_ranks_that_differ_after_a_step_are_named() -> None:
    audit = RankAudit(2)
    audit.ran(0, 1, (1, 2, 3, 4))
    with pytest.raises(Broken, match="the carries of ranks 0 and 1 differ"):
        audit.ran(1, 1, (1, 2, 9, 4))


def test_a_rank_outside_of_a_group_is_compared_by_its_tables_alone() -> None:
    audit = RankAudit(3)
    audit.ran(0, 1, (1, 2))
    audit.ran(1, 1, (1, 2, 3, 4))
    with pytest.raises(Broken, match="the log of ranks 0 and 2 differ"):
        audit.ran(2, 1, (1, 2, 3, 5))


def test_a_rank_that_skips_a_step_or_stays_behind_is_told() -> None:
    audit = RankAudit(2)
    audit.ran(0, 1, (1,))
    with pytest.raises(Broken, match="rank 0 runs step 3 after step 1"):
        audit.ran(0, 3, (1,))
    with pytest.raises(Broken, match=r"idle at steps \[1, 0\]"):
        audit.idle()


def test_a_client_gets_each_token_once_and_one_end() -> None:
    audit = ClientAudit()
    audit.opened(1)
    with pytest.raises(Broken, match="never ended"):
        audit.finished()
    audit.token(1, 0, 5, 5)
    with pytest.raises(Broken, match="got token 2, due is 1"):
        audit.token(1, 2, 5, 5)
    with pytest.raises(Broken, match="got 6 at 1, due is 5"):
        audit.token(1, 1, 6, 5)
    with pytest.raises(Broken, match="ended with 1 of 2 tokens"):
        audit.ended(1, LENGTH, 2)


def test_nothing_comes_after_the_end() -> None:
    audit = ClientAudit()
    audit.opened(1)
    audit.ended(1, ERROR, None)
    with pytest.raises(Broken, match="after it had ended"):
        audit.token(1, 0, 5, 5)
    with pytest.raises(Broken, match="ended twice"):
        audit.ended(1, ERROR, None)


def test_equal_beginnings_have_equal_marks_and_other_sequences_other_tokens() -> None:
    oracle = Oracle()
    prompt = np.arange(6, dtype=np.int32)
    one, two = oracle.foresee(1, prompt, 5), oracle.foresee(2, prompt, 5)
    assert one.marks[:6].tolist() == two.marks[:6].tolist()
    assert one.generated(1) != two.generated(1)
    assert (one.until(one.generated(3)).due, one.until(one.generated(3)).finish) == (3, STOP)
    assert one.until(-1) == one


def test_a_token_that_is_not_due_breaks_a_constraint() -> None:
    oracle = Oracle()
    owed = oracle.foresee(1, np.arange(6, dtype=np.int32), 5)
    foreseen = Foreseen(1, owed)
    before = foreseen.allowed()
    foreseen.accept(owed.generated(1))
    assert foreseen.allowed() != before
    with pytest.raises(Broken, match="constraint"):
        foreseen.accept(owed.generated(1))
