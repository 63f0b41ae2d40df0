from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.engine.sampler import Sampler, SamplerError
from mstar.messages.request import Sampling
from tests.engine.test_sampler import VOCAB, make_sampler, random_logits, sample


@pytest.mark.parametrize("spread", [2.0, 60.0])
def test_logprobs_are_those_of_the_raw_model(spread):
    shapes = [
        Sampling(temperature=0.4, top_k=9, repetition_penalty=2.0, logit_bias=((8, 50.0),), logprobs=5),
        Sampling(temperature=0.0, logprobs=0),
    ]
    logits = random_logits(2, spread=spread)
    result = sample(make_sampler(shapes), logits, logprobs=True)
    raw = logits.double().log_softmax(-1)
    torch.testing.assert_close(
        result.logprob.double(), raw.gather(1, result.tokens[:, None]).squeeze(1), atol=1e-5, rtol=1e-6
    )
    values, ids = raw.topk(20)
    assert torch.equal(result.top_ids, ids)
    torch.testing.assert_close(result.top_logprobs.double(), values, atol=1e-5, rtol=1e-6)


def test_a_row_that_did_not_ask_carries_nothing():
    result = sample(make_sampler([Sampling(), Sampling(logprobs=2)]), random_logits(2), logprobs=True)
    assert result.logprob.isnan().tolist() == [True, False]
    assert result.top_ids[0].tolist() == [-1] * 20
    assert result.top_logprobs[0].isnan().all()


@pytest.mark.parametrize("asked", [True, False])
def test_nothing_is_computed_when_no_row_asks_or_the_step_does_not(asked):
    sampler = make_sampler([Sampling(logprobs=-1 if asked else 3)])
    assert sample(sampler, random_logits(1), logprobs=asked)[1:] == (None, None, None)
    assert sampler.statistics().scored == 0


def test_alternatives_of_equal_value_come_by_id_and_the_greedy_token_is_the_first():
    logits = torch.zeros(1, VOCAB)
    logits[0, [900, 31, 4000]] = 7.0
    result = sample(make_sampler([Sampling(temperature=0.0, logprobs=3)]), logits, logprobs=True)
    assert result.top_ids[0, :3].tolist() == [31, 900, 4000]
    assert result.tokens.tolist() == [31]


def test_a_vocabulary_of_fewer_than_20_is_filled_up():
    result = sample(make_sampler([Sampling(logprobs=20)], vocab=3), random_logits(1, vocab=3), logprobs=True)
    assert sorted(result.top_ids[0, :3].tolist()) == [0, 1, 2]
    assert result.top_ids[0, 3:].tolist() == [-1] * 17
    assert np.isneginf(result.top_logprobs[0, 3:].numpy()).all()


def test_a_row_without_a_token_has_no_logprob():
    sampler = Sampler(1, 4, torch.device("cpu"))
    sampler.bind(
        0,
        Sampling(logprobs=1),
        stop_ids=range(4),
        min_tokens=1,
        prompt=np.zeros(0, dtype=np.int32),
        accepted=0,
    )
    with pytest.raises(SamplerError) as caught:
        sample(sampler, random_logits(1, vocab=4), positions=[0], logprobs=True)
    assert caught.value.result.logprob.isnan().all()


def test_logprobs_are_the_same_alone_and_in_a_batch():
    shapes = [Sampling(logprobs=4, seed=seed) for seed in range(20)]
    logits = random_logits(20).bfloat16()
    together = sample(make_sampler(shapes), logits, logprobs=True)
    alone = sample(make_sampler(shapes), logits[13:14], [13], [5], logprobs=True)
    assert torch.equal(together.logprob[13:14], alone.logprob)
    assert torch.equal(together.top_logprobs[13:14], alone.top_logprobs)
