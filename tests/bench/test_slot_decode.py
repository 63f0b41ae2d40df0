"""The slot-vector decode step on CPU: Triton's interpreter, and torch attention behind the same tables."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tools.bench import slot_decode_kernels as kernels
from tools.bench.slot_decode_step import (
    RING,
    Rows,
    Shape,
    SlotDecoder,
    SlotState,
    TorchAttention,
    random_weights,
    reference_forward,
)

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


class Conversation:
    """Prompts of random length whose keys and values the reference puts into the slot's pages."""

    def __init__(self, seed: int, *, horizon: int = 1) -> None:
        self.random = np.random.default_rng(seed)
        self.weights = random_weights(SHAPE, torch.float32, "cpu", seed)
        self.state = small_state()
        self.attention: list[TorchAttention] = []
        self.decoder = SlotDecoder(
            self.weights, SHAPE, self.state, (1, 4, 8), self.reference_attention, horizon=horizon
        )
        self.free = [int(page) for page in self.random.permutation(np.arange(1, 40))]
        self.tokens: dict[int, list[int]] = {}
        self.prompt: dict[int, int] = {}
        self.finished: list[tuple[list[int], int]] = []

    def reference_attention(self, rows: Rows) -> TorchAttention:
        self.attention.append(TorchAttention())
        return self.attention[-1]

    def join(self, slot: int, prompt: int, room: int) -> None:
        tokens = self.random.integers(0, SHAPE.vocab, prompt).tolist()
        pages = [self.free.pop() for _ in range((prompt + room) // PAGE + 1)]
        _, kv = reference_forward(self.weights, SHAPE, torch.tensor(tokens))
        for cache, (keys, values) in zip(self.state.cache, kv, strict=True):
            for at in range(prompt - 1):  # the last prompt token is the first step's input
                cache[pages[at // PAGE], 0, at % PAGE] = keys[at]
                cache[pages[at // PAGE], 1, at % PAGE] = values[at]
        grants = np.array([(slot, index, page) for index, page in enumerate(pages)], dtype=np.int32)
        self.decoder.bind(np.array([(slot, prompt - 1, tokens[-1])], dtype=np.int32), grants)
        self.tokens[slot], self.prompt[slot] = tokens, prompt

    def leave(self, slot: int) -> None:
        self.finished.append((self.tokens.pop(slot), self.prompt.pop(slot)))

    def collect(self, step: int) -> None:
        slots, tokens = self.decoder.collect(step)
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if slot in self.tokens:
                self.tokens[slot].append(token)


@pytest.mark.parametrize("horizon", [1, 4])
def test_rows_join_and_leave_by_slot_vector_and_get_the_tokens_of_the_eager_reference(horizon: int) -> None:
    talk = Conversation(3, horizon=horizon)
    riding: list[int] = []
    joins = {0: (4, 1, 16), 1: (0, 6, 18), 3: (5, 9, 9), 9: (2, 4, 8), 12: (4, 7, 6)}
    leaves = {7: 5, 10: 4, 14: 0}
    for step in range(17):
        if step in leaves:
            riding.remove(leaves[step])
        if step in joins:
            talk.join(*joins[step])
            riding.append(joins[step][0])
        talk.decoder.launch(np.array(riding, dtype=np.int32))  # launched before the last one is collected
        if step:
            talk.collect(step)
        if step in leaves:
            talk.leave(leaves[step])
    talk.collect(17)
    for slot in list(talk.tokens):
        talk.leave(slot)
    assert [len(tokens) - prompt for tokens, prompt in talk.finished] == [4, 10, 13, 8, 5]
    for tokens, prompt in talk.finished:
        logits, _ = reference_forward(talk.weights, SHAPE, torch.tensor(tokens))
        assert tokens[prompt:] == logits[prompt - 1 : -1].argmax(-1).tolist()
    generated = {token for tokens, prompt in talk.finished for token in tokens[prompt:]}
    assert len(generated) > 10


def test_padding_rows_use_the_scratch_slot_and_page_and_no_other() -> None:
    talk = Conversation(5)
    talk.join(3, 5, 4)
    before = [cache.clone() for cache in talk.state.cache]
    for step in range(1, 4):
        talk.decoder.launch(np.array([3], dtype=np.int32))
        talk.collect(step)
    talk.join(1, 2, 8)
    talk.join(2, 3, 8)
    talk.decoder.launch(np.array([1, 2, 3], dtype=np.int32))  # 3 rows in a bucket of 4
    state = talk.state
    assert (state.position[6], state.carry[6]) == (0, 0)
    assert state.position[[0, 4, 5]].tolist() == [-1, -1, -1]
    owned = {0} | set(state.block_table[state.block_table >= 0].tolist())
    for cache, old in zip(state.cache, before, strict=True):
        touched = (~cache.isnan() & old.isnan()).flatten(1).any(1).nonzero().flatten().tolist()
        assert 0 in touched
        assert set(touched) <= owned


def test_the_planner_runs_again_only_when_a_page_count_changes() -> None:
    talk = Conversation(7)
    talk.join(0, 2, 20)
    for step in range(1, 1 + 3 * PAGE):
        talk.decoder.launch(np.array([0], dtype=np.int32))
        talk.collect(step)
    # the first new token is the second of its page; then a page is entered every PAGE steps
    assert [plan[-1] for plan in talk.attention[0].plans] == [1, 2, 3, 4]
    assert talk.decoder.plans == 4


def test_what_the_host_hands_over_does_not_grow_with_context() -> None:
    talk = Conversation(9)
    talk.join(0, 25, 4)
    mailbox, decoder = talk.decoder.mailbox.arrays, talk.decoder
    mailbox["binds"][:], mailbox["grants"][:] = -9, -9
    decoder.launch(np.array([0], dtype=np.int32))
    decoder.collect(1)
    assert mailbox["slots"][0].tolist() == [0] + [6] * 7
    assert (mailbox["binds"] == -9).all()
    assert (mailbox["grants"] == -9).all()


def test_a_step_that_never_lands_is_named() -> None:
    talk = Conversation(11)
    with pytest.raises(TimeoutError, match="step 1 did not land within 0.01 s: the word says 0"):
        talk.decoder.collect(1, deadline=0.01)
