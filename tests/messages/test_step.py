"""The plan record: golden plans are encoded, decoded and validated, and anything else is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from mstar.engine.slot_table import PlanMismatch, SlotTable
from mstar.messages.request import Sampling
from mstar.messages.step import (
    COUNTER,
    END,
    FLAG_LOGPROBS,
    SLOT,
    START,
    STRIDE,
    TOTAL,
    DigestMismatch,
    Mask,
    StepPlan,
    TailTooLarge,
    open_plan,
)
from shm.steps import StepSlot
from tests.messages.plans import SCENARIOS, Chunk, Decode, Scenario, Step, bind, new_slot, pages, write

GOLDEN = Path(__file__).with_name("golden.json")

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


def same(a: StepPlan, b: StepPlan) -> bool:
    return all(
        x.tolist() == y.tolist() if isinstance(x, np.ndarray) and isinstance(y, np.ndarray) else x == y
        for x, y in zip(a, b, strict=True)
    )


def fingerprint(slot: StepSlot) -> str:
    columns = (slot.request, slot.rows, slot.grants, slot.drops)
    whole = slot.header.tobytes() + b"".join(column.tobytes() for column in columns) + slot.tail.tobytes()
    return hashlib.blake2b(whole, digest_size=12).hexdigest()


def fingerprints(scenario: Scenario) -> list[str]:
    found = []
    for seq, step in enumerate(scenario.steps, 1):
        slot = new_slot()
        write(seq, step, slot)
        found.append(fingerprint(slot))
    return found


@pytest.mark.behaviour("S0-04", "S0-07")
@each_scenario
def test_a_golden_plan_reads_back_as_it_was_written(scenario: Scenario) -> None:
    for seq, step in enumerate(scenario.steps, 1):
        slot = new_slot()
        written = write(seq, step, slot)
        assert same(open_plan(seq, slot), written)


@each_scenario
def test_a_golden_plan_has_the_bytes_it_always_had(scenario: Scenario) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert fingerprints(scenario) == golden[scenario.name], (
        "the record's wire form changed: say so in its version"
    )


@each_scenario
def test_every_rank_validates_a_golden_plan_and_ends_in_the_same_state(scenario: Scenario) -> None:
    ranks = scenario.tables()
    for seq, step in enumerate(scenario.steps, 1):
        plan = write(seq, step, new_slot())
        for tables in ranks:
            run(tables[plan.node], plan)
    for node, table in enumerate(ranks[0]):
        for other in ranks[1:]:
            assert table.slot_of == other[node].slot_of
            assert all(np.array_equal(a, b) for a, b in zip(table.tables, other[node].tables, strict=True))


@pytest.mark.behaviour("S0-06", "S0-07", "S0-09")
def test_a_step_without_a_chunked_row_has_four_empty_columns() -> None:
    plan = open_plan(1, _written(Step(rows=(Decode(0, 1, 1), Decode(1, 2, 4)))))
    for column in (plan.chunk_starts, plan.chunk_ends, plan.chunk_totals, plan.chunk_strides):
        assert column.size == 0
        assert column.dtype == np.int32


@pytest.mark.behaviour("S0-05")
def test_a_row_that_is_not_chunked_carries_minus_one_beside_one_that_is() -> None:
    plan = open_plan(1, _written(Step(rows=(Decode(0, 1, 1), Chunk(1, 2, 0, 8, 20)))))
    assert plan.chunk_starts.tolist() == [-1, 0]
    assert plan.chunk_strides.tolist() == [-1, 8]


@pytest.mark.behaviour("S0-16", "S4-04")
def test_a_first_chunk_past_a_cached_prefix_strides_to_its_end() -> None:
    plan = open_plan(1, _written(Step(rows=(Chunk(0, 1, 48, 80, 96, counter=0),))))
    assert (plan.chunk_starts[0], plan.chunk_strides[0]) == (48, 80)


def test_a_plan_without_rows_may_drop() -> None:
    plan = open_plan(1, _written(Step(drops=(5, 6))))
    assert plan.request.size == 0
    assert plan.drops.tolist() == [5, 6]


def test_flags_survive_beside_the_records_own() -> None:
    plan = open_plan(1, _written(Step(rows=(Chunk(0, 1, 0, 8, 8),), flags=FLAG_LOGPROBS)))
    assert plan.flags == FLAG_LOGPROBS


def test_a_bind_too_large_for_the_tail_is_refused_by_its_size() -> None:
    huge = Sampling(logit_bias=tuple((token, 1.0) for token in range(500)))
    with pytest.raises(TailTooLarge, match=r"\d+ bytes, its slot has 4096"):
        write(1, Step(binds=(bind(1, 0, 8, sampling=huge),)), new_slot())


@pytest.mark.behaviour("F-05")
@pytest.mark.parametrize("column", range(10))
def test_a_corrupted_column_is_noticed_before_anything_runs(column: int) -> None:
    slot = _written(Step(rows=(Decode(0, 1, 1), Chunk(1, 2, 0, 8, 20))))
    slot.rows[column, 1] ^= 1
    with pytest.raises(DigestMismatch, match="step 1"):
        open_plan(1, slot)


@pytest.mark.behaviour("F-05")
@pytest.mark.parametrize("word", [1, 2, 3, 4, 6])
def test_a_corrupted_word_of_the_header_is_noticed_before_anything_runs(word: int) -> None:
    slot = _written(Step(rows=(Decode(0, 1, 1), Chunk(1, 2, 0, 8, 20)), binds=(bind(2, 1, 20),)))
    slot.header[word] ^= 1 << 33 if word in (1, 3, 4) else 1
    with pytest.raises(DigestMismatch, match="step 1"):
        open_plan(1, slot)


@pytest.mark.behaviour("F-05")
def test_any_corrupted_byte_of_the_tail_is_noticed_before_anything_runs() -> None:
    """A cap, a seed or a mask that differs on one rank would let its tokens differ without a word."""
    step = Step(rows=(Decode(0, 1, 1),), binds=(bind(2, 1, 20, cap=9),), masks=(Mask(0, b"\x05\x00"),))
    for at in range(_written(step).header[6]):
        slot = _written(step)
        slot.tail[at] ^= 1
        with pytest.raises(DigestMismatch, match="step 1"):
            open_plan(1, slot)


def run(table: SlotTable, plan: StepPlan) -> None:
    """What an Executor does with a plan, short of launching it."""
    table.change(plan)
    table.advance(plan)


def _written(step: Step) -> StepSlot:
    slot = new_slot()
    write(1, step, slot)
    return slot


def _running() -> SlotTable:
    """A table with request 1 decoding (2 tokens so far, cap 5) and request 2 at 8 of 20 prompt tokens."""
    table = SlotTable(16, (8,))
    steps = (
        Step(
            rows=(Chunk(0, 1, 0, 8, 8), Chunk(1, 2, 0, 8, 20)),
            binds=(bind(1, 0, 8, cap=5), bind(2, 1, 20)),
            grants=(*pages(0, 3), *pages(1, 4)),
        ),
        Step(rows=(Decode(0, 1, 1),)),
    )
    for seq, step in enumerate(steps, 1):
        plan = write(seq, step, new_slot())
        run(table, plan)
    return table


GOOD = Step(rows=(Decode(0, 1, 2), Chunk(1, 2, 8, 16, 20)), grants=pages(1, 5))


def test_the_plan_that_fits_passes() -> None:
    run(_running(), write(3, GOOD, new_slot()))


@pytest.mark.behaviour("F-05", "S0-15", "S0-29")
@pytest.mark.parametrize(
    ("column", "row", "value", "field"),
    [
        (SLOT, 0, 3, "request"),
        (SLOT, 0, 99, "slot"),
        (SLOT, 1, 0, "request"),
        (COUNTER, 0, 1, "counter"),
        (COUNTER, 1, 0, "counter"),
        (START, 1, 9, "chunk_strides"),
        (END, 1, 21, "chunk_strides"),
        (TOTAL, 1, 21, "chunk_totals"),
        (STRIDE, 1, 7, "chunk_strides"),
    ],
)
def test_a_row_that_contradicts_this_rank_names_step_row_and_both_values(
    column: int, row: int, value: int, field: str
) -> None:
    table = _running()
    slot = new_slot()
    plan = write(3, GOOD, slot)
    slot.rows[column, row] = value
    before = table.progress.copy(), table.generated.copy()
    with pytest.raises(PlanMismatch, match=f"step 3, row .*{field}") as caught:
        run(table, plan)
    assert caught.value.planned != caught.value.held
    assert np.array_equal(before[0], table.progress)
    assert np.array_equal(before[1], table.generated)


@pytest.mark.parametrize(
    ("step", "field"),
    [
        (Step(rows=(Decode(0, 9, 2),)), "request"),
        (Step(drops=(9,)), "drop"),
        (Step(drops=(1, 1)), "drop"),
        (Step(rows=(Decode(0, 1, 2), Decode(0, 1, 2))), "named by an earlier row"),
        (Step(rows=(Chunk(1, 2, 8, 16, 20), Chunk(1, 2, 8, 16, 20))), "named by an earlier row"),
        (Step(rows=(Decode(1, 2, 0),)), "counter"),
        (Step(rows=(Chunk(1, 2, 8, 16, 20), Decode(0, 1, 2))), "chunked rows come last"),
        (Step(binds=(bind(9, 0, 8),)), "bind of slot 0"),
        (Step(binds=(bind(9, 5, 8), bind(8, 5, 8))), "bind of slot 5"),
        (Step(binds=(bind(9, 16, 8),)), "bind slot"),
        (Step(rows=(Chunk(1, 2, 8, 24, 20),)), "chunk"),
        (Step(grants=((1, 2, 0),)), "grant pool"),
        (Step(grants=((16, 0, 0),)), "grant slot"),
        (Step(grants=pages(3, 7)), "grant slot is 3 in the plan, free"),
        (Step(drops=(1,), grants=pages(0, 7)), "grant slot is 0 in the plan, free"),
        (Step(rows=(Decode(1, 2, 2**31 - 1),)), "counter"),
        (Step(rows=(Decode(0, 1, 2),), drops=(1,)), "request"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_part_that_contradicts_this_rank_is_refused(step: Step, field: str) -> None:
    with pytest.raises(PlanMismatch, match=field):
        run(_running(), write(3, step, new_slot()))


def test_a_decode_row_may_not_pass_its_cap() -> None:
    table = _running()
    for seq, counter in ((3, 2), (4, 3), (5, 4)):
        plan = write(seq, Step(rows=(Decode(0, 1, counter),)), new_slot())
        run(table, plan)
    with pytest.raises(PlanMismatch, match="cap 5"):
        run(table, write(6, Step(rows=(Decode(0, 1, 5),)), new_slot()))


def test_a_plan_may_not_run_twice() -> None:
    with pytest.raises(PlanMismatch, match="seq"):
        run(_running(), write(2, Step(), new_slot()))


def test_a_drop_frees_the_slot_for_a_bind_of_the_same_plan() -> None:
    table = _running()
    step = Step(rows=(Chunk(0, 9, 0, 8, 8),), drops=(1,), binds=(bind(9, 0, 8),), grants=pages(0, 6))
    plan = write(3, step, new_slot())
    run(table, plan)
    assert table.slot_of == {2: 1, 9: 0}
    assert table.tables[0][0, :2].tolist() == [6, -1]


def test_pages_are_appended_in_the_records_order() -> None:
    table = _running()
    plan = write(3, Step(grants=((1, 0, 7), (0, 0, 2), (1, 0, 5))), new_slot())
    run(table, plan)
    assert table.tables[0][1, :4].tolist() == [4, 7, 5, -1]
    assert table.held[0][:2].tolist() == [2, 3]


def _wide() -> SlotTable:
    """A table with requests 10 to 15 in slots 0 to 5, three pages of each row taken by the even ones."""
    table = SlotTable(16, (8,))
    binds = tuple(bind(10 + slot, slot, 8) for slot in range(6))
    grants = tuple((slot, 0, 100 + 10 * slot + page) for slot in range(0, 6, 2) for page in range(3))
    run(table, write(1, Step(binds=binds, grants=grants), new_slot()))
    return table


def test_a_page_each_for_many_slots_and_a_run_for_one_end_where_they_belong() -> None:
    table = _wide()
    singles = tuple((slot, 0, 200 + slot) for slot in range(6))
    run(table, write(2, Step(grants=(*singles, *pages(5, 300, 301), *pages(0, 302))), new_slot()))
    assert table.held[0][:6].tolist() == [5, 1, 4, 1, 4, 3]
    assert table.tables[0][0, :6].tolist() == [100, 101, 102, 200, 302, -1]
    assert table.tables[0][3, :2].tolist() == [203, -1]
    assert table.tables[0][5, :4].tolist() == [205, 300, 301, -1]


@pytest.mark.parametrize(
    ("grant", "field"),
    [
        ((6, 0, 9), "grant slot is 6 in the plan, free"),
        ((16, 0, 9), "grant slot"),
        ((5, 1, 9), "grant pool"),
        ((5, 0, -1), "grant page"),
    ],
)
def test_one_bad_grant_among_many_is_named(grant: tuple[int, int, int], field: str) -> None:
    singles = tuple((slot, 0, 200 + slot) for slot in range(5))
    with pytest.raises(PlanMismatch, match=field):
        run(_wide(), write(2, Step(grants=(*singles, grant)), new_slot()))


def test_many_rows_may_not_pass_their_tables_end() -> None:
    table = _wide()
    for seq in range(2, 7):
        grants = tuple((slot, 0, 200 + slot) for slot in range(6))
        run(table, write(seq, Step(grants=grants), new_slot()))
    with pytest.raises(PlanMismatch, match="pages of slot 0"):
        run(table, write(7, Step(grants=tuple((slot, 0, 9) for slot in range(6))), new_slot()))


def test_more_pages_than_a_row_may_hold_are_refused() -> None:
    plan = write(3, Step(grants=tuple((1, 0, page) for page in range(10, 20))), new_slot())
    table = _running()
    with pytest.raises(PlanMismatch, match="pages of slot 1"):
        run(table, plan)


@pytest.mark.behaviour("S0-08")
@pytest.mark.parametrize("column", ["chunk_starts", "chunk_ends", "chunk_totals", "chunk_strides"])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_chunk_column_of_another_length_is_refused_before_any_row_is_touched(
    column: str, size: int
) -> None:
    table = _running()
    plan = write(3, GOOD, new_slot())
    broken = plan._replace(**{column: np.resize(getattr(plan, column), size)})
    before = table.progress.copy(), table.generated.copy()
    with pytest.raises(PlanMismatch, match=r"step 3, row .*chunk_") as caught:
        run(table, broken)
    assert caught.value.planned != caught.value.held
    assert np.array_equal(before[0], table.progress)
    assert np.array_equal(before[1], table.generated)


@pytest.mark.behaviour("S0-09")
def test_rows_without_any_chunk_column_are_no_mismatch() -> None:
    table = _running()
    run(table, write(3, Step(rows=(Decode(0, 1, 2),)), new_slot()))
    assert table.generated[0] == 3


@pytest.mark.behaviour("S0-16")
def test_a_chunk_is_the_first_exactly_when_its_stride_is_its_end() -> None:
    """With a cached prefix or without: what the record says of the first chunk and of the later ones."""
    for cached in (0, 16, 48):
        table = SlotTable(16, (8,))
        first = Step(rows=(Chunk(0, 1, cached, 64, 96, counter=0),), binds=(bind(1, 0, 96),))
        plan = write(1, first, new_slot())
        assert plan.chunk_strides.tolist() == plan.chunk_ends.tolist()
        run(table, plan)
        plan = write(2, Step(rows=(Chunk(0, 1, 64, 96, 96),)), new_slot())
        assert plan.chunk_strides.tolist() == [32]
        run(table, plan)
        assert table.progress[0] == 96
