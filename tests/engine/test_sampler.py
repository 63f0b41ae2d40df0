from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mstar.engine.philox import uniforms
from mstar.engine.sample_draw import RowParameters, _cut_sorted, draw, padded, threshold, weigh
from mstar.engine.sampler import Sampler, SamplerError, SampleResult
from mstar.messages.request import Sampling
from tests.engine import sample_reference as reference

VOCAB = 5000  # not a whole number of blocks
CPU = torch.device("cpu")
NOTHING = np.zeros(0, dtype=np.int32)

SHAPES = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.3, seed=2),
    Sampling(temperature=1.0, top_k=1, seed=3),
    Sampling(temperature=1.2, top_k=7, seed=4),
    Sampling(temperature=1.0, top_k=900, seed=5),
    Sampling(temperature=1.0, top_p=0.9, seed=6),
    Sampling(temperature=2.0, top_p=0.999, seed=7),
    Sampling(temperature=0.7, top_p=0.0001, seed=8),
    Sampling(temperature=1.0, top_k=50, top_p=0.8, seed=9),
    Sampling(temperature=1.0, min_p=0.05, seed=10),
    Sampling(temperature=1.5, top_k=40, top_p=0.95, min_p=0.1, seed=11),
    Sampling(temperature=1.0, repetition_penalty=1.3, seed=12),
    Sampling(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.2),
    Sampling(temperature=0.8, logit_bias=((3, 4.0), (4999, 100.0)), seed=13),
    Sampling(temperature=0.0, logit_bias=((17, 100.0),)),
]


def make_sampler(shapes: list[Sampling], vocab: int = VOCAB) -> Sampler:
    sampler = Sampler(len(shapes), vocab, CPU)
    for slot, sampling in enumerate(shapes):
        prompt = np.array([1, 2, 2, 3, 3], dtype=np.int32)
        sampler.bind(slot, sampling, stop_ids=(), min_tokens=0, prompt=prompt, accepted=2)
    return sampler


def random_logits(rows: int, vocab: int = VOCAB, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def sample(
    sampler: Sampler, logits: torch.Tensor, slots=None, positions=None, logprobs=False
) -> SampleResult:
    slots = np.arange(len(logits), dtype=np.int32) if slots is None else np.asarray(slots, dtype=np.int32)
    positions = np.full(len(slots), 5, dtype=np.int64) if positions is None else np.asarray(positions)
    return sampler.sample(logits, slots, positions, logprobs=logprobs)


def tokens_over_positions(sampling: Sampling, logits: torch.Tensor, count: int) -> np.ndarray:
    """What one sequence draws from the same logits at ``count`` positions."""
    rows = 500
    sampler = Sampler(rows, logits.shape[0], CPU)
    for slot in range(rows):
        sampler.bind(slot, sampling, stop_ids=(), min_tokens=0, prompt=NOTHING, accepted=0)
    steps = [np.arange(first, first + rows) for first in range(0, count, rows)]
    batch = logits.expand(rows, -1)
    return np.concatenate([sample(sampler, batch, positions=step).tokens.numpy() for step in steps])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_in_any_batch(dtype):
    shapes = SHAPES * 4
    logits = random_logits(len(shapes)).to(dtype)
    positions = np.arange(len(shapes)) + 5
    together = sample(make_sampler(shapes), logits, positions=positions).tokens
    order = np.random.default_rng(0).permutation(len(shapes))
    shuffled = sample(make_sampler(shapes), logits[order], slots=order, positions=positions[order]).tokens
    alone = make_sampler(shapes)
    single = [sample(alone, logits[row : row + 1], [row], [row + 5]).tokens for row in range(len(shapes))]
    assert shuffled.tolist() == together[order].tolist()
    assert torch.cat(single).tolist() == together.tolist()


def test_every_token_is_the_one_of_the_reference():
    logits = random_logits(len(SHAPES), seed=3)
    differ = 0
    sampler = make_sampler(SHAPES)
    for position in range(5, 45):
        for slot, sampling in enumerate(SHAPES):  # as bound: counts as at the start
            sampler.bind(
                slot, sampling, stop_ids=(), min_tokens=0, prompt=np.array([1, 2, 2, 3, 3], "i4"), accepted=2
            )
        got = sample(sampler, logits, positions=np.full(len(SHAPES), position)).tokens.tolist()
        for row, sampling in enumerate(SHAPES):
            values = reference.processed(logits[row].double().numpy(), sampling, [1, 2, 2], [3, 3])
            if sampling.temperature == 0:
                assert got[row] == values.argmax()
                continue
            key = [np.array([part]) for part in (sampling.seed, sampling.choice, 0, position)]
            share = reference.probabilities(values, sampling)
            assert share[got[row]] > 0
            differ += got[row] != reference.token_at(share, uniforms(*key)[0])
    assert differ <= 2  # of 520: a uniform within 1e-6 of a border may fall on its other side


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, top_k=20),
        Sampling(temperature=1.3, top_p=0.7),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=0.9, top_k=12, top_p=0.9, min_p=0.05),
    ],
)
def test_the_kept_tokens_are_those_of_transformers(sampling):
    logits = random_logits(1, vocab=64, seed=5)
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p > 0:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    share = scores.softmax(-1)[0].double().numpy()
    drawn = tokens_over_positions(sampling, logits[0], 10_000)
    assert set(drawn.tolist()) == set(np.flatnonzero(share).tolist())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=11),
        Sampling(temperature=0.6, top_k=30, seed=12),
        Sampling(temperature=1.0, top_p=0.8, seed=13),
        Sampling(temperature=2.0, min_p=0.1, seed=14),
    ],
)
def test_draws_follow_the_distribution(sampling):
    logits = random_logits(1, vocab=200, seed=6)[0]
    count = 30_000
    share = reference.probabilities(logits.double().numpy(), sampling)
    drawn = np.bincount(tokens_over_positions(sampling, logits, count), minlength=200)
    expected = share * count
    assert drawn[share == 0].sum() == 0
    tail = expected < 20
    cells = np.append(expected[~tail], expected[tail].sum())
    seen = np.append(drawn[~tail], drawn[tail].sum())
    cells, seen = cells[cells > 0], seen[cells > 0]
    statistic = ((seen - cells) ** 2 / cells).sum()
    degrees = len(cells) - 1
    # Wilson and Hilferty's normal form of chi-square, at 3.3 deviations.
    deviations = ((statistic / degrees) ** (1 / 3) - 1 + 2 / (9 * degrees)) / (2 / (9 * degrees)) ** 0.5
    assert abs(deviations) < 3.3


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.zeros(2, VOCAB)
    logits[0, [70, 4000]] = 5.0
    logits[1, [4999, 64]] = 5.0
    assert sample(make_sampler([Sampling(temperature=0.0)] * 2), logits).tokens.tolist() == [70, 64]


def test_tied_tokens_at_the_border_of_top_k_are_all_kept():
    logits = torch.full((VOCAB,), -5.0)
    logits[[10, 20, 30]] = 1.0
    drawn = tokens_over_positions(Sampling(temperature=1.0, top_k=2), logits, 500)
    assert set(drawn.tolist()) == {10, 20, 30}


def test_a_thousand_tied_tokens_are_all_kept():
    logits = torch.full((VOCAB,), -9.0)
    tied = torch.arange(0, VOCAB, 5)
    logits[tied] = 1.0
    drawn = tokens_over_positions(Sampling(temperature=1.0, top_k=2), logits, 10_000)
    assert set(drawn.tolist()) == set(tied.tolist())


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_sorting_what_is_reached_and_sorting_all_cut_at_the_same_weight(spread):
    limits = [(0, 0.3), (0, 0.9999), (7, 1.0), (900, 0.5), (4999, 0.9), (1, 0.9)]
    top_k, top_p = torch.tensor(limits, dtype=torch.float64).T
    weights = random_logits(len(limits), vocab=padded(VOCAB), spread=spread).softmax(-1)
    weights /= weights.amax(-1, keepdim=True)
    rows = RowParameters(torch.ones(6), top_k, top_p, torch.zeros(6), torch.zeros(6))
    expected = _cut_sorted(weights.sort(-1, descending=True).values, rows)
    torch.testing.assert_close(threshold(weights, rows), expected, rtol=1e-3, atol=0)
    kept = (weights >= threshold(weights, rows)[:, None]).sum(-1)
    assert (kept - (weights >= expected[:, None]).sum(-1)).abs().max() <= 1


def test_a_masked_token_is_never_drawn_even_at_the_ends_of_the_uniform():
    logits = torch.full((5, 192), -torch.inf)
    logits[:, [65, 130]] = 0.0
    weights = weigh(logits, logits.amax(-1), torch.ones(5, dtype=torch.float64), torch.empty_like(logits))
    uniform = torch.tensor([0.0, 0.4999999, 0.5, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    assert draw(weights, torch.full((5,), 2.0**-99), uniform).tolist() == [65, 65, 130, 130, 130]


def test_a_far_smaller_temperature_is_greedy_and_never_overflows():
    shapes = [Sampling(temperature=1e-40), Sampling(temperature=1e-3, top_p=0.9)]
    logits = random_logits(2)
    assert sample(make_sampler(shapes), logits).tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", SHAPES)
def test_a_row_of_nan_or_inf_is_named_and_the_others_are_good(sampling, poison):
    logits = random_logits(3)
    expected = sample(make_sampler([sampling] * 3), logits).tokens.tolist()
    logits[1, 4321] = poison
    with pytest.raises(SamplerError, match="row 1 ") as caught:
        sample(make_sampler([sampling] * 3), logits)
    assert caught.value.rows == (1,)
    assert caught.value.slots == (1,)
    assert caught.value.result.tokens.tolist() == [expected[0], -1, expected[2]]


def test_a_row_with_every_token_forbidden_is_named():
    with pytest.raises(SamplerError, match="every token is forbidden"):
        sample(make_sampler(SHAPES[:1]), torch.full((1, VOCAB), -torch.inf))


def test_an_unbound_slot_is_refused():
    sampler = make_sampler(SHAPES[:2])
    sampler.release(1)
    with pytest.raises(SamplerError, match="slot 1, which is not bound"):
        sample(sampler, random_logits(2))


def test_logits_stay_as_they_are():
    logits = random_logits(len(SHAPES))
    before = logits.clone()
    sample(make_sampler(SHAPES), logits, logprobs=True)
    assert torch.equal(logits, before)


def test_stop_ids_are_not_drawn_before_min_tokens():
    sampler = Sampler(1, VOCAB, CPU)
    logits = random_logits(1)
    best, second = logits[0].topk(2).indices.tolist()
    prompt = np.arange(10, dtype=np.int32)
    sampler.bind(
        0, Sampling(temperature=0.0), stop_ids=(best, VOCAB + 7), min_tokens=3, prompt=prompt, accepted=1
    )
    # The sequence has a prompt of 9 and one token already: its tokens 2 and 3 may not be the stop id.
    drawn = [int(sample(sampler, logits, positions=[position]).tokens) for position in (10, 11, 12)]
    assert drawn == [second, second, best]


def test_a_slot_bound_again_keeps_nothing_of_its_former_sequence():
    sampler = Sampler(1, VOCAB, CPU)
    logits = random_logits(1)
    best = int(logits.argmax())
    former = Sampling(temperature=0.0, logit_bias=((best, -100.0),), presence_penalty=2.0)
    sampler.bind(0, former, stop_ids=(best,), min_tokens=9, prompt=NOTHING, accepted=0)
    assert int(sample(sampler, logits).tokens) != best
    sampler.bind(0, Sampling(temperature=0.0), stop_ids=(best,), min_tokens=0, prompt=NOTHING, accepted=0)
    assert int(sample(sampler, logits).tokens) == best
    assert sampler.statistics().penalised == 1


def test_the_same_seed_repeats_and_another_choice_differs():
    def run(choice: int) -> list[int]:
        return tokens_over_positions(Sampling(seed=77, choice=choice), random_logits(1)[0], 500).tolist()

    assert run(0) == run(0)
    assert sum(a == b for a, b in zip(run(0), run(1), strict=True)) < 100


def test_a_vocabulary_smaller_than_a_block_works():
    sampler = make_sampler(SHAPES[:13], vocab=11)
    result = sample(sampler, random_logits(13, vocab=11), logprobs=True)
    assert result.tokens.min() >= 0
    assert result.tokens.max() < 11


def test_a_bias_outside_the_vocabulary_is_refused_by_id():
    sampler = Sampler(1, VOCAB, CPU)
    with pytest.raises(SamplerError, match="token id 5000 at index 1"):
        sampler.bind(
            0,
            Sampling(logit_bias=((1, 1.0), (5000, 1.0))),
            stop_ids=(),
            min_tokens=0,
            prompt=NOTHING,
            accepted=0,
        )


def test_only_rows_that_need_it_pay():
    sampler = make_sampler(SHAPES)
    sample(sampler, random_logits(len(SHAPES)))
    figures = sampler.statistics()
    assert (figures.greedy, figures.sampled, figures.filtered, figures.penalised) == (3, 13, 8, 2)
    assert figures.scored == 0
