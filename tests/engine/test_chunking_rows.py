"""Chunks as they run: ranges and strides, the inputs they are cut from, and steps over their budget."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.chunking import ChunkingManagement, ChunkingPolicy, ChunkRange
from mstar.messages.step import StepPlan
from mstar.worker.batch import split_fairly
from tests.worker.local_rank import LocalRank, Prompt
from tests.worker.null_rank import LIMITS, NullRank, expected

LOGGER = "mstar.engine.chunking"


class Tokens(NamedTuple):
    """An input of so many tokens."""

    num_tokens: int

    def slice(self, start: int, end: int) -> Self:
        return self._replace(num_tokens=end - start)


class Step(NamedTuple):
    """A step as it was scheduled."""

    node_name: str
    graph_walk: str


# ---- ranges ----------------------------------------------------------------------------------------


@pytest.mark.behaviour("S4-02")
def test_a_chunk_range_is_an_immutable_tuple() -> None:
    chunk = ChunkRange(16, 48, 100, 48)
    assert chunk == (16, 48, 100, 48)
    assert (chunk.start, chunk.end, chunk.total, chunk.stride) == chunk
    with pytest.raises(AttributeError):
        chunk.end = 49  # type: ignore[misc]


@pytest.mark.behaviour("S4-03")
@pytest.mark.parametrize(("end", "final"), [(99, False), (100, True), (1, False)])
def test_a_chunk_is_final_when_it_reaches_the_total(end: int, final: bool) -> None:
    assert ChunkRange(0, end, 100, end).is_final is final


def ranges_of(rank: NullRank) -> dict[int, list[ChunkRange]]:
    """The chunks of every request, as plans give them to a rank that is about to launch them."""
    found: dict[int, list[ChunkRange]] = defaultdict(list)

    def read(plan: StepPlan) -> None:
        columns = (plan.chunk_starts, plan.chunk_ends, plan.chunk_totals, plan.chunk_strides)
        for row in (plan.chunk_starts >= 0).nonzero()[0].tolist():
            found[int(plan.request[row])].append(ChunkRange(*(int(column[row]) for column in columns)))

    rank.on_launch = read
    return found


@pytest.mark.behaviour("S4-04")
@pytest.mark.behaviour("S4-05")
@pytest.mark.behaviour("S4-06")
@settings(deadline=None, max_examples=40)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 2)), min_size=1, max_size=10),
    budget=st.integers(8, 64),
    floor=st.integers(1, 8),
    depth=st.integers(0, 2),
)
def test_the_strides_of_a_prompt_count_its_tokens_past_any_cached_prefix(
    prompts: list[tuple[int, int]], budget: int, floor: int, depth: int
) -> None:
    rank = NullRank(LIMITS._replace(batch_tokens=budget, min_chunk_tokens=floor, depth=depth))
    found = ranges_of(rank)
    for request, (length, family) in enumerate(prompts, 1):
        rank.admit(request, length, 3, family=family)
        rank.turn()
    rank.drain()
    for request, (length, _) in enumerate(prompts, 1):
        first, *later = chunks = found[request]
        assert first.stride == first.end
        assert first.start % LIMITS.page_size == 0
        assert all(chunk.stride == chunk.end - chunk.start for chunk in later)
        assert [chunk.start for chunk in later] == [chunk.end for chunk in chunks[:-1]]
        assert sum(chunk.stride for chunk in chunks) == length
        assert {chunk.total for chunk in chunks} == {length}
        assert [chunk.is_final for chunk in chunks] == [False] * len(later) + [True]
        assert rank.kept[request].tokens == expected(request, length, 3)


@pytest.mark.behaviour("S4-04")
def test_the_first_stride_covers_the_cached_prefix_that_it_skips() -> None:
    rank = NullRank()
    rank.admit(1, 40, family=1)
    rank.drain()
    found = ranges_of(rank)
    rank.admit(2, 42, family=1)
    rank.drain()
    assert found[2] == [ChunkRange(40, 42, 42, 42)]


@pytest.mark.behaviour("S4-06")
def test_the_loop_of_a_rank_counts_tokens_and_not_chunks() -> None:
    rank = NullRank(LIMITS._replace(batch_tokens=8))
    found = ranges_of(rank)
    rank.admit(1, 30, 2)
    counters = []
    while not any(chunk.is_final for chunk in found[1]):
        rank.turn()
        counters.append(int(rank.table.progress[rank.table.slot_of[1]]))
    assert counters == [8, 16, 24, 30]
    rank.drain()


@pytest.mark.behaviour("S4-17")
def test_rows_of_several_walks_share_the_budget_of_one_step() -> None:
    rank = NullRank(LIMITS._replace(batch_tokens=16))
    sizes: list[tuple[int, int]] = []

    def read(plan: StepPlan) -> None:
        cut = plan.chunk_starts >= 0
        chunks = int((plan.chunk_ends - plan.chunk_starts)[cut].sum())
        sizes.append((plan.request.size - int(cut.sum()), chunks))

    for request in (1, 2, 3):
        rank.admit(request, 4, 30)
    rank.turn()
    rank.on_launch = read
    rank.admit(4, 100, 2)
    rank.drain()
    mixed = [size for size in sizes if all(size)]
    assert len(mixed) > 5
    assert max(decodes + chunks for decodes, chunks in mixed) == 16


@pytest.mark.behaviour("S4-27")
def test_decodes_that_nearly_fill_a_step_leave_a_prompt_its_floor_or_nothing() -> None:
    made = ChunkingManagement({})
    made.set_policies({("llm", "mixed"): ChunkingPolicy(1024, chunkable=True)})
    made.set_budgets({}, ("mixed",))
    for decodes in (0, 900, 960, 961, 1023, 1024):
        budget = made.max_batch_tokens("llm", "mixed")
        assert budget is not None
        shares = split_fairly([5000, 5000], budget - decodes, made.min_chunk_tokens(budget))
        assert all(share == 0 or share >= 64 for share in shares)
        assert bool(shares[0]) == (budget - decodes >= 64)


# ---- held inputs -----------------------------------------------------------------------------------


def local_rank(directory: Path, **deployment: Any) -> LocalRank:
    fields = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_bytes": 4 << 20, "max_batch_tokens": 16}
    return LocalRank(directory, **{"min_chunk_tokens": 4, **fields, **deployment})


def prompt(length: int) -> Prompt:
    return Prompt(tuple((length + at * at) % 200 + 3 for at in range(length)), 4)


@pytest.mark.behaviour("S4-01")
@pytest.mark.behaviour("S4-32")
@pytest.mark.behaviour("S4-33")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_input_is_prepared_once_held_while_it_is_cut_and_gone_when_it_has_landed(
    tiny_model_dir: Path, depth: int
) -> None:
    rank = local_rank(tiny_model_dir, pipeline_depth=depth)
    asked = [prompt(length) for length in (100, 37, 9)]
    held: list[int] = []
    turn = rank._turn

    def watched(answers: Any) -> None:
        turn(answers)
        held.append(rank.engine.runner.statistics().held)

    rank._turn = watched  # type: ignore[method-assign]
    answers = rank.generate(asked)
    assert [len(answer.tokens) for answer in answers] == [4, 4, 4]
    assert rank.engine.runner.statistics().prepared == 3
    assert max(held) == 3
    assert held[-1] == 0


@pytest.mark.behaviour("S4-14")
def test_tokens_are_the_same_with_budgets_of_every_size_and_with_chunking_off(tiny_model_dir: Path) -> None:
    asked = [prompt(length) for length in (70, 33, 5)]
    whole, *others = (
        [answer.tokens for answer in local_rank(tiny_model_dir, max_batch_tokens=size).generate(asked)]
        for size in ("off", 8, 16, {"llm": {"prefill_decode": 64}}, {"llm": None})
    )
    assert [len(tokens) for tokens in whole] == [4, 4, 4]
    assert others == [whole] * 4


@pytest.mark.behaviour("S4-33")
def test_release_drops_the_input_of_one_row_at_one_node() -> None:
    made = ChunkingManagement({})
    made.prepared.update({(1, "a"): Tokens(5), (1, "b"): Tokens(6), (11, "a"): Tokens(7)})
    for _ in range(2):
        made.release(1, "a")
        assert set(made.prepared) == {(1, "b"), (11, "a")}


@pytest.mark.behaviour("S4-34")
@given(st.lists(st.tuples(st.sampled_from("prf"), st.integers(0, 3), st.sampled_from("ab")), max_size=40))
def test_whatever_is_told_in_whatever_order_a_forgotten_request_holds_nothing(
    told: list[tuple[str, int, str]],
) -> None:
    made = ChunkingManagement({})
    held: set[tuple[int, str]] = set()
    for what, rid, node in told:
        if what == "p":
            made.prepared[rid, node] = Tokens(1)
            held.add((rid, node))
        elif what == "r":
            made.release(rid, node)
            held.discard((rid, node))
        else:
            made.forget_request(rid)
            held = {key for key in held if key[0] != rid}
        assert set(made.prepared) == held
        assert made.statistics().prepared == len(held)


# ---- overruns --------------------------------------------------------------------------------------


def budgeted(**overrides: int) -> ChunkingManagement:
    made = ChunkingManagement({})
    made.set_policies(
        {
            ("llm", "prefill"): ChunkingPolicy(100, chunkable=True),
            ("llm", "mixed"): ChunkingPolicy(50, chunkable=True),
            ("llm", "image"): ChunkingPolicy(100, chunkable=False),
        }
    )
    made.set_budgets(overrides, ("prefill", "decode", "image"), {"prefill": "mixed", "decode": "mixed"})
    return made


@pytest.mark.behaviour("S4-29")
@pytest.mark.behaviour("S4-17")
def test_a_step_is_measured_against_the_budget_of_the_walk_it_ran_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = budgeted()
    with caplog.at_level(logging.INFO, LOGGER):
        made.check_budget(Step("llm", "mixed"), [Tokens(30), Tokens(20)])
        made.check_budget(Step("llm", "prefill"), [Tokens(51)])
        made.check_budget(Step("llm", "decode"), [Tokens(5000)])
        made.check_budget(Step("codec", "prefill"), [Tokens(5000)])
        assert caplog.records == []
        made.check_budget(Step("llm", "mixed"), [Tokens(30), Tokens(21)])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        "a step of walk mixed on node llm runs 51 tokens, more than its budget of 50" in record.getMessage()
    )
    assert made.statistics().overruns == {"mixed": 1}


@pytest.mark.behaviour("S4-30")
@pytest.mark.parametrize(
    ("walk", "rows"),
    [
        ("image", [Tokens(400)]),  # cannot be cut: runs whole
        ("mixed", [Tokens(1)] * 20 + [Tokens(40)]),  # was sized when fewer rows were expected to go on
    ],
)
def test_legal_overruns_are_told_and_stop_nothing(
    caplog: pytest.LogCaptureFixture, walk: str, rows: list[Tokens]
) -> None:
    made = budgeted()
    with caplog.at_level(logging.INFO, LOGGER):
        made.check_budget(Step("llm", walk), rows)
    assert len(caplog.records) == 1
    assert made.statistics().overruns == {walk: 1}


@pytest.mark.behaviour("S4-31")
@pytest.mark.behaviour("S4-01")
def test_overruns_are_logged_on_powers_of_two_for_each_walk(caplog: pytest.LogCaptureFixture) -> None:
    made = budgeted(llm=60)
    told: dict[str, list[int]] = defaultdict(list)
    for count in range(1, 40):
        for walk in ("mixed", "prefill") if count % 3 else ("mixed",):
            caplog.clear()
            with caplog.at_level(logging.INFO, LOGGER):
                made.check_budget(Step("llm", walk), [Tokens(61)])
            if caplog.records:
                told[walk].append(made.statistics().overruns[walk])
    assert told == {"mixed": [1, 2, 4, 8, 16, 32], "prefill": [1, 2, 4, 8, 16]}
    assert made.statistics().overruns == {"mixed": 39, "prefill": 26}


@pytest.mark.behaviour("S0-02")
def test_a_node_that_is_not_chunked_has_no_budget_to_run_over(caplog: pytest.LogCaptureFixture) -> None:
    made = ChunkingManagement({})
    made.set_policies({("llm", "mixed"): ChunkingPolicy(50, chunkable=True)})
    made.set_budgets({"llm": 20}, ("mixed",), no_chunking=("llm",))
    caplog.clear()
    made.check_budget(Step("llm", "mixed"), [Tokens(5000)])
    assert caplog.records == []
    assert made.statistics().overruns == {}
