from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.engine.penalties import Penalties
from mstar.engine.sampler import Sampler, SamplerError
from mstar.messages.request import Sampling
from tests.engine import sample_reference as reference
from tests.engine.test_sampler import random_logits, sample

CPU = torch.device("cpu")
VOCAB = 300
ALL = Sampling(repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=-0.3)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@pytest.mark.parametrize(
    "sampling",
    [
        ALL,
        Sampling(repetition_penalty=0.8),
        Sampling(frequency_penalty=-1.5),
        Sampling(presence_penalty=2.0),
    ],
)
def test_prompt_and_output_count_apart(sampling):
    penalties = Penalties(3, VOCAB, CPU)
    penalties.bind(2, sampling, ids(1, 2, 2, 9), ids(9, 4, 4))
    logits = random_logits(1, VOCAB)
    expected = reference.processed(logits[0].double().numpy(), sampling, [1, 2, 2, 9], [9, 4, 4])
    penalties.apply(logits, np.array([2]))
    np.testing.assert_allclose(logits[0].numpy(), expected, atol=1e-6)


def test_a_drawn_token_counts_from_the_next_step_on():
    penalties = Penalties(2, VOCAB, CPU)
    penalties.bind(0, ALL, ids(1), ids())
    penalties.bind(1, ALL, ids(1), ids(7))
    penalties.count(np.array([1, 0]), torch.tensor([7, 8]))
    logits = random_logits(2, VOCAB)
    expected = [
        reference.processed(logits[0].double().numpy(), ALL, [1], [8]),
        reference.processed(logits[1].double().numpy(), ALL, [1], [7, 7]),
    ]
    penalties.apply(logits, np.array([0, 1]))
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-6)


def test_a_failed_row_counts_nothing():
    penalties = Penalties(1, VOCAB, CPU)
    penalties.bind(0, ALL, ids(), ids())
    penalties.count(np.array([0]), torch.tensor([-1]))
    logits = random_logits(1, VOCAB)
    before = logits.clone()
    penalties.apply(logits, np.array([0]))
    assert torch.equal(logits, before)


def test_tables_are_allocated_when_the_first_sequence_asks():
    sampler = Sampler(4, VOCAB, CPU)
    sampler.bind(0, Sampling(), stop_ids=(), min_tokens=0, prompt=ids(1), accepted=0)
    assert sampler.statistics().penalty_bytes == 0
    sampler.bind(1, ALL, stop_ids=(), min_tokens=0, prompt=ids(1), accepted=0)
    assert sampler.statistics().penalty_bytes >= 4 * VOCAB * 5


def test_a_slot_that_is_bound_again_forgets_its_former_sequence():
    sampler = Sampler(1, VOCAB, CPU)
    logits = random_logits(1, VOCAB)
    favourite = int(logits.argmax())
    ban = Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    sampler.bind(0, ban, stop_ids=(), min_tokens=0, prompt=ids(*[favourite] * 9), accepted=8)
    assert int(sample(sampler, logits).tokens) != favourite
    sampler.bind(0, ban, stop_ids=(), min_tokens=0, prompt=ids(favourite), accepted=0)
    assert int(sample(sampler, logits).tokens) == favourite


def test_a_rebind_with_accepted_tokens_goes_on_as_if_nothing_happened():
    sampling = Sampling(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.2)
    logits = random_logits(1, VOCAB)

    def run(sampler: Sampler, first: int, last: int) -> list[int]:
        return [int(sample(sampler, logits, positions=[place]).tokens) for place in range(first, last)]

    whole = Sampler(1, VOCAB, CPU)
    whole.bind(0, sampling, stop_ids=(), min_tokens=0, prompt=ids(5, 6), accepted=0)
    expected = run(whole, 2, 32)
    assert len(set(expected)) > 5
    halves = Sampler(1, VOCAB, CPU)
    halves.bind(0, sampling, stop_ids=(), min_tokens=0, prompt=ids(5, 6), accepted=0)
    begun = run(halves, 2, 15)
    halves.bind(0, sampling, stop_ids=(), min_tokens=0, prompt=ids(5, 6, *begun), accepted=len(begun))
    assert begun + run(halves, 15, 32) == expected


def test_a_prompt_token_outside_the_vocabulary_is_refused_by_id():
    with pytest.raises(SamplerError, match="prompt holds the token id 300 at index 1"):
        Sampler(1, VOCAB, CPU).bind(0, ALL, stop_ids=(), min_tokens=0, prompt=ids(0, 300), accepted=0)
