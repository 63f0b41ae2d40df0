"""Depths 0, 1 and 2 are one code path: the same tokens, greedy and seeded, alone and in mixed load."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from mstar.messages.request import Sampling
from mstar.messages.tokens import LENGTH, STOP
from tests.worker.local_rank import Answer, LocalRank, Prompt

SEEDED = Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=1234)


def prompts(count: int, sampling: Sampling, *, longest: int = 90) -> list[Prompt]:
    rng = np.random.default_rng(7)
    return [
        Prompt(
            tuple(rng.integers(3, 250, int(rng.integers(1, longest))).tolist()),
            int(rng.integers(1, 24)),
            sampling if sampling.temperature == 0 else Sampling(0.9, 0.95, 40, seed=1000 + i),
        )
        for i in range(count)
    ]


def rank(directory: Path, depth: int, **deployment: object) -> LocalRank:
    settings = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_bytes": 8 << 20, "max_batch_tokens": 64}
    return LocalRank(directory, pipeline_depth=depth, **{**settings, **deployment})


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@pytest.mark.behaviour("F-36", "S0-26")
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("stagger", [0, 3], ids=["at once", "staggered"])
def test_every_depth_gives_the_same_tokens_alone_and_in_mixed_load(
    tiny_model_dir: Path, sampling: Sampling, stagger: int
) -> None:
    asked = prompts(14, sampling)
    alone = [rank_answer for prompt in asked for rank_answer in rank_alone(tiny_model_dir, prompt)]
    for depth in (0, 1, 2):
        answers = rank(tiny_model_dir, depth).generate(asked, stagger=stagger)
        assert tokens(answers) == alone
        assert [answer.finish for answer in answers] == [[LENGTH]] * len(asked)


_alone: dict[tuple[Path, Prompt], list[list[int]]] = {}


def rank_alone(directory: Path, prompt: Prompt) -> list[list[int]]:
    """The tokens of ``prompt`` with nothing beside it, at depth 0."""
    key = (directory, prompt)
    if key not in _alone:
        _alone[key] = tokens(rank(directory, 0).generate([prompt]))
    return _alone[key]


def test_greedy_tokens_are_those_of_transformers(tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    asked = prompts(6, Sampling(temperature=0.0))
    answers = rank(tiny_model_dir, 1).generate(asked)
    for prompt, answer in zip(asked, answers, strict=True):
        ids = torch.tensor([prompt.tokens])
        out = reference.generate(
            ids, max_new_tokens=prompt.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert answer.tokens == out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_do_not_change_when_rows_are_preempted(tiny_model_dir: Path, depth: int) -> None:
    asked = [prompt._replace(max_tokens=60) for prompt in prompts(10, SEEDED, longest=30)]
    roomy = tokens(rank(tiny_model_dir, depth).generate(asked))
    tight = rank(tiny_model_dir, depth, page_size=4, max_seq_len=96, horizon_tokens=4)
    spoken_for = tight.engine.limits.pages - 48
    tight.scheduler.nodes[0].ledger.promise(spoken_for)
    answers = tight.generate(asked)
    assert tight.scheduler.statistics().preempted > 0
    assert tokens(answers) == roomy


@pytest.mark.behaviour("F-26")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_id_ends_a_row_with_itself_as_the_last_token(tiny_model_dir: Path, depth: int) -> None:
    asked = prompts(4, Sampling(temperature=0.0))[1]._replace(max_tokens=20)
    whole = rank(tiny_model_dir, 0).generate([asked])[0].tokens
    stop = whole[7]
    first = whole.index(stop)
    answer = rank(tiny_model_dir, depth).generate([asked._replace(stop_ids=(stop,))])[0]
    assert answer.tokens == whole[: first + 1]
    assert answer.finish == [STOP]


def test_stop_ids_are_not_sampled_before_min_tokens(tiny_model_dir: Path) -> None:
    asked = prompts(4, Sampling(temperature=0.0))[1]._replace(max_tokens=20)
    stop = rank(tiny_model_dir, 0).generate([asked])[0].tokens[0]
    answer = rank(tiny_model_dir, 1).generate([asked._replace(stop_ids=(stop,), min_tokens=12)])[0]
    assert stop not in answer.tokens[:12]


def test_logprobs_come_only_for_rows_that_ask(tiny_model_dir: Path) -> None:
    plain = prompts(2, Sampling(temperature=0.0))[0]._replace(max_tokens=5)
    scored = plain._replace(sampling=Sampling(temperature=0.0, logprobs=3))
    answers = rank(tiny_model_dir, 1).generate([plain, scored])
    assert answers[0].tokens == answers[1].tokens
    for token, (logprob, tops) in zip(answers[1].tokens, answers[1].scores, strict=True):
        assert tops[token] == pytest.approx(logprob)
        assert logprob == max(tops.values())
    assert all(np.isnan(logprob) for logprob, _ in answers[0].scores)


def test_a_forward_that_fails_ends_its_batch_and_the_rank_goes_on(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = rank(tiny_model_dir, 2)
    asked = Prompt((5, 80, 120, 33, 7), 8)
    whole = local.generate([asked])[0].tokens
    model = local.engine.runner._model
    calls = 0
    forward = model.forward

    def failing(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("planted")
        return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "forward", failing)
    answers = local.generate([asked, asked])
    assert all("planted" in answer.failed[0].message for answer in answers)
    assert local.generate([asked])[0].tokens == whole
    assert local.scheduler.nodes[0].ledger.statistics().free == local.engine.limits.pages


def test_a_row_whose_logits_are_not_numbers_fails_alone(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = rank(tiny_model_dir, 1)
    asked = [prompt._replace(max_tokens=10) for prompt in prompts(2, Sampling(temperature=0.0))]
    whole = tokens(local.generate(asked))
    model = local.engine.runner._model
    forward = model.forward
    calls = 0

    def broken(*args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits: torch.Tensor = forward(*args)  # type: ignore[arg-type]
        if calls == 4:
            logits = logits.clone()
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(model, "forward", broken)
    answers = local.generate(asked)
    assert len(answers[0].failed) == 1
    assert answers[1].tokens == whole[1]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.behaviour("F-36")
def test_the_default_model_gives_the_same_tokens_at_every_depth(model_dir: Path) -> None:
    rng = np.random.default_rng(3)
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.9)):
        asked = [
            Prompt(
                tuple(rng.integers(100, 40000, int(rng.integers(4, 300))).tolist()),
                24,
                msgspec.structs.replace(sampling, seed=i),
            )
            for i in range(12)
        ]
        found = []
        for depth in (0, 1, 2):
            local = LocalRank(model_dir, dtype="float32", threads=1, max_num_seqs=12, pipeline_depth=depth)
            found.append(tokens(local.generate(asked, stagger=2)))
        assert found[0] == found[1] == found[2]


class Classes:
    """A token must be in the class after the last one's: which tokens those are, only the host knows."""

    def __init__(self, vocab: int, classes: int = 5) -> None:
        self.vocab, self.classes = vocab, classes
        self.last = 0

    def allowed(self) -> bytes:
        bits = np.arange(self.vocab) % self.classes == (self.last + 1) % self.classes
        bits[:3] = False
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token: int) -> None:
        assert token % self.classes == (self.last + 1) % self.classes
        self.last = token


@pytest.mark.behaviour("F-37")
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), SEEDED], ids=["greedy", "seeded"])
def test_rows_that_draw_late_get_the_same_tokens_at_every_depth_beside_rows_that_do_not(
    tiny_model_dir: Path, sampling: Sampling
) -> None:
    free = prompts(8, sampling)
    alone = [answer for prompt in free for answer in rank_alone(tiny_model_dir, prompt)]
    late_tokens = []
    for depth in (0, 1, 2):
        here = rank(tiny_model_dir, depth)
        vocab = here.engine.runner.vocab_size
        late = [prompt._replace(constraint=Classes(vocab), max_tokens=12) for prompt in prompts(4, sampling)]
        answers = here.generate(
            [part for pair in zip(late, free[:4], strict=True) for part in pair] + free[4:]
        )
        held = tokens(answers[:8:2])
        assert tokens([*answers[1:8:2], *answers[8:]]) == alone
        for given in held:
            assert [token % 5 for token in given] == [(at + 1) % 5 for at in range(12)]
        late_tokens.append(held)
    assert late_tokens[0] == late_tokens[1] == late_tokens[2]


def test_a_mask_that_allows_everything_changes_nothing(tiny_model_dir: Path) -> None:
    class Anything(Classes):
        def allowed(self) -> bytes:
            return b"\xff" * (-(-self.vocab // 8))

        def accept(self, token: int) -> None:
            pass

    here = rank(tiny_model_dir, 1)
    asked = prompts(6, SEEDED)
    free = tokens(here.generate(asked))
    vocab = here.engine.runner.vocab_size
    assert tokens(here.generate([each._replace(constraint=Anything(vocab)) for each in asked])) == free
