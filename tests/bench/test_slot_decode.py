"""The slot-vector decode step on CPU: Triton's interpreter, and torch attention behind the same tables."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tools.bench.slot_decode import kernels
from tools.bench.slot_decode.attention import TorchAttention
from tools.bench.slot_decode.check import Conversation, Join
from tools.bench.slot_decode.mailbox import RING
from tools.bench.slot_decode.model import random_weights
from tools.bench.slot_decode.state import Rows, Shape, SlotState

pytestmark = pytest.mark.timeout(90)  # the interpreter runs a kernel's lines one by one

PAGE = 4
SHAPE = Shape(2, 32, 4, 2, 16, 48, 96, 64, tied=False, rope_theta=1e4)


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def small_state(slots: int = 6, pages: int = 40, pages_per_slot: int = 8) -> SlotState:
    return SlotState(SHAPE, slots, pages, pages_per_slot, PAGE, torch.float32, "cpu")


@pytest.mark.parametrize("step", [0, 1, 2, RING + 3])
def test_rows_are_gathered_by_the_slots_of_the_steps_own_ring_entry(step: int) -> None:
    state = small_state()
    state.position[:6] = int32(0, 3, 4, 7, 8, 30)  # on and beside page borders
    state.carry[:6] = torch.arange(10, 16, dtype=torch.int32)
    ring = torch.stack([torch.roll(int32(5, 1, 3, 6, 6), turn) for turn in range(RING)])
    counter, rows = torch.tensor([step]), Rows(5, state, SHAPE)
    outputs = (rows.slots, rows.ids, rows.positions, rows.indptr, rows.last_page_len)
    kernels.begin_rows(
        counter, ring, rows.slots, state.carry, state.position,
        rows.ids, rows.positions, rows.indptr, rows.last_page_len, PAGE,
    )  # fmt: skip
    expected = kernels.begin_rows_reference(counter, ring, 5, state.carry, state.position, PAGE)
    for got, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_page_tables_are_gathered_on_the_device_and_nothing_past_their_end_is_written() -> None:
    table = torch.randperm(7 * 300).to(torch.int32).view(7, 300)
    slots, indptr = int32(4, 0, 6), int32(0, 1, 258, 561 - 3)  # more pages than one block of lanes
    indices = torch.full((700,), -7, dtype=torch.int32)
    kernels.gather_pages(slots, table, indptr, indices)
    expected = kernels.gather_pages_reference(slots, table, indptr)
    assert torch.equal(indices[: len(expected)], expected)
    assert (indices[len(expected) :] == -7).all()


def test_queries_are_rotated_and_keys_and_values_land_in_the_last_page_only() -> None:
    state = small_state()
    weights = random_weights(SHAPE, torch.float32, "cpu")
    rows, cache, layer = Rows(3, state, SHAPE), state.cache[0], weights.layers[0]
    rows.positions.copy_(int32(0, 5, 11))
    rows.indptr.copy_(int32(0, 1, 3, 6))
    rows.indices[:6] = int32(9, 2, 3, 6, 5, 4)
    qkv = torch.randn(3, 8 * 16)
    kernels.norm_rope_store(
        qkv, rows.query, cache, layer.q_norm, layer.k_norm,
        weights.cos, weights.sin, rows.positions, rows.indptr, rows.indices, SHAPE.eps,
    )  # fmt: skip
    q, k, v = qkv.view(3, 8, 16).split([4, 2, 2], 1)
    trig = weights.cos, weights.sin, rows.positions, SHAPE.eps
    torch.testing.assert_close(rows.query, kernels.norm_rope_reference(q, layer.q_norm, *trig))
    expected_k = kernels.norm_rope_reference(k, layer.k_norm, *trig)
    for row, (page, offset) in enumerate([(9, 0), (3, 1), (4, 3)]):
        torch.testing.assert_close(cache[page, 0, offset], expected_k[row])
        torch.testing.assert_close(cache[page, 1, offset], v[row])
    assert int((~cache.isnan()).sum()) == 3 * 2 * 2 * 16


def test_publishing_writes_carry_and_position_by_slot_and_leaves_the_scratch_slot_alone() -> None:
    state = small_state()
    state.position[:6] = int32(5, -1, 9, -1, 2, -1)
    slots, tokens = int32(4, 0, 2, 6), torch.tensor([71, 72, 73, 74])
    counter, word = torch.tensor([RING + 2]), torch.tensor([RING + 2])
    ring = torch.full((RING, 8), -1, dtype=torch.int32)
    expected = kernels.publish_reference(tokens, slots, 6, state.carry, state.position)
    kernels.publish(tokens, slots, 6, state.carry, state.position, counter, ring, word)
    assert torch.equal(state.carry, expected[0])
    assert torch.equal(state.position, expected[1])
    assert ring[2].tolist() == [71, 72, 73, 74, -1, -1, -1, -1]
    assert (ring[[0, 1, 3]] == -1).all()
    assert counter.item() == word.item() == RING + 3


def test_binds_and_grants_of_this_step_are_applied_by_slot_and_no_others() -> None:
    state = small_state()
    counts = int32([0, 0], [2, 300], [0, 0], [9, 9])
    binds = torch.full((RING, 3, 3), -5, dtype=torch.int32)
    binds[1, :2] = int32([4, 17, 70], [2, 0, 71])
    grants = torch.full((RING, 2000, 3), -5, dtype=torch.int32)
    table = torch.full((7, 300), -1, dtype=torch.int32)
    grants[1, :300] = torch.stack([torch.full((300,), 4), torch.arange(300), torch.arange(300) * 3 + 1], 1)
    kernels.bind(torch.tensor([RING + 1]), counts, binds, grants, state.carry, state.position, table)
    assert state.position.tolist() == [-1, -1, 0, -1, 17, -1, 0]
    assert state.carry.tolist() == [-1, -1, 71, -1, 70, -1, 0]
    assert table[4].tolist() == [3 * i + 1 for i in range(300)]
    assert (table[[0, 1, 2, 3, 5, 6]] == -1).all()


def test_a_step_takes_its_binds_once() -> None:
    talk, _ = conversation(13)
    talk.join(Join(0, 3, 4))
    with pytest.raises(ValueError, match="step 1 already has its binds"):
        talk.join(Join(1, 3, 4))


def conversation(seed: int, *, horizon: int = 1) -> tuple[Conversation, list[TorchAttention]]:
    attention: list[TorchAttention] = []

    def reference_attention(rows: Rows) -> TorchAttention:
        attention.append(TorchAttention())
        return attention[-1]

    weights, buckets = random_weights(SHAPE, torch.float32, "cpu", seed), (1, 4, 8)
    talk = Conversation(
        SHAPE, weights, small_state(), buckets, reference_attention, seed=seed, horizon=horizon
    )
    return talk, attention


@pytest.mark.parametrize("horizon", [1, 4])
def test_rows_join_and_leave_by_slot_vector_and_get_the_tokens_of_the_eager_reference(horizon: int) -> None:
    talk, _ = conversation(3, horizon=horizon)
    joins = {0: Join(4, 1, 16), 1: Join(0, 6, 18), 3: Join(5, 9, 9), 9: Join(2, 4, 8), 12: Join(4, 7, 6)}
    talk.run(17, joins, leaves={7: 5, 10: 4, 14: 0})
    assert [len(tokens) - prompt for tokens, prompt in talk.finished] == [4, 10, 13, 8, 5]
    verdict = talk.verdict()
    assert (verdict.equal, verdict.worst_gap) == (40, 0.0)
    assert verdict.distinct > 10


def test_padding_rows_use_the_scratch_slot_and_page_and_no_other() -> None:
    talk, _ = conversation(5)
    state, riding = talk.state, []
    for step in range(1, RING + 4):
        if step <= 3:
            talk.join(Join(step, step, 12))
            riding.append(step)
        talk.decoder.launch(np.array(riding, dtype=np.int32))
        talk.collect(step)
    left_at = int(state.position[3])
    cache = [layer.clone() for layer in state.cache]
    for step in range(RING + 4, RING + 7):
        talk.decoder.launch(np.array([1, 2], dtype=np.int32))  # 2 rows in a bucket of 4 that held 3 before
        talk.collect(step)
    assert (state.position[6], state.carry[6], state.position[3]) == (0, 0, left_at)
    assert state.position[[0, 4, 5]].tolist() == [-1] * 3
    allowed = {0, *state.block_table[[1, 2]].flatten().tolist()}
    for layer, before in zip(state.cache, cache, strict=True):
        changed = (layer.nan_to_num(7.0) != before.nan_to_num(7.0)).flatten(1).any(1)
        assert changed.any()
        assert set(changed.nonzero().flatten().tolist()) <= allowed


def test_the_planner_runs_again_only_when_a_page_count_changes() -> None:
    talk, attention = conversation(7)
    talk.join(Join(0, 2, 20))
    for step in range(1, 1 + 3 * PAGE):
        talk.decoder.launch(np.array([0], dtype=np.int32))
        talk.collect(step)
    # the first new token is the second of its page; then a page is entered every PAGE steps
    assert [plan[-1] for plan in attention[0].plans] == [1, 2, 3, 4]
    assert talk.decoder.plans == 4


def test_what_the_host_hands_over_does_not_grow_with_context() -> None:
    talk, _ = conversation(9)
    talk.join(Join(0, 25, 4))
    mailbox, decoder = talk.decoder.mailbox.arrays, talk.decoder
    for name in ("binds", "grants", "counts"):
        mailbox[name][:] = -9
    decoder.launch(np.array([0], dtype=np.int32))
    decoder.collect(1)
    assert mailbox["slots"][0].tolist() == [0] + [6] * 7
    assert all((mailbox[name] == -9).all() for name in ("binds", "grants", "counts"))


def test_a_step_that_never_lands_is_named() -> None:
    talk, _ = conversation(11)
    with pytest.raises(TimeoutError, match=r"step 1 did not land within 0\.01 s: the word says 0"):
        talk.decoder.collect(1, deadline=0.01)
