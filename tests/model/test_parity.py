"""Every family against transformers on tiny random weights, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mstar.distributed.matmul import Layout
from mstar.model.api import CausalLM
from mstar.model.files import ModelFiles
from mstar.model.weights import load_model
from tests.model.runs import FAMILIES, Paged, reference

TOLERANCE = 1e-4
CPU = torch.device("cpu")


class Pair(NamedTuple):
    theirs: Any
    ours: CausalLM
    directory: Path

    def expected(self, tokens: list[int]) -> Tensor:
        """transformers' logits [n, vocab] of a whole sequence."""
        with torch.inference_mode():
            logits: Tensor = self.theirs(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp(request.param)
    theirs = reference(request.param, directory)
    return Pair(
        theirs, load_model(ModelFiles(request.param, directory), dtype=torch.float32, device=CPU), directory
    )


def sequence(length: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(
        3, 256, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return tokens


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_a_prompt_in_one_go_gives_transformers_logits(pair: Pair) -> None:
    tokens = sequence(37, 1)
    close(Paged(pair.ours, 1).step([(0, tokens)]), pair.expected(tokens))


@pytest.mark.parametrize("chunk", [1, 2, 7, 16])
def test_a_prompt_in_chunks_gives_transformers_logits(pair: Pair, chunk: int) -> None:
    tokens, run = sequence(37, 2), Paged(pair.ours, 1)
    parts = [run.step([(0, tokens[at : at + chunk])]) for at in range(0, len(tokens), chunk)]
    close(torch.cat(parts), pair.expected(tokens))


def test_prefill_chunks_and_decode_rows_mix_in_one_batch(pair: Pair) -> None:
    tokens = [sequence(length, 10 + length) for length in (40, 23, 31, 9)]
    expected = [pair.expected(t) for t in tokens]
    run = Paged(pair.ours, 4)
    run.step([(0, tokens[0][:38]), (1, tokens[1][:9])])
    # A decode row, a chunk that continues, two whole prompts; then only decode rows, in another order.
    mixed = run.step([(0, tokens[0][38:39]), (1, tokens[1][9:22]), (2, tokens[2][:30]), (3, tokens[3][:8])])
    wanted = (expected[0][38:39], expected[1][9:22], expected[2][:30], expected[3][:8])
    close(mixed, torch.cat(wanted))
    last = run.step([(3, tokens[3][8:]), (0, tokens[0][39:]), (2, tokens[2][30:]), (1, tokens[1][22:])])
    close(last, torch.stack([expected[3][8], expected[0][39], expected[2][30], expected[1][22]]))


def test_greedy_tokens_equal_those_of_generate(pair: Pair) -> None:
    prompts = [sequence(length, 20 + length) for length in (5, 18, 11)]
    run = Paged(pair.ours, 3)
    logits = run.step(list(enumerate(prompts)))
    ends = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
    new = logits[ends].argmax(-1).tolist()
    ours = [[token] for token in new]
    for _ in range(11):
        new = run.step([(i, [token]) for i, token in enumerate(new)]).argmax(-1).tolist()
        for out, token in zip(ours, new, strict=True):
            out.append(token)
    for prompt, out in zip(prompts, ours, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            theirs = pair.theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
            )
        assert out == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("layout", list(Layout))
def test_every_weight_layout_gives_the_same_logits(pair: Pair, layout: Layout) -> None:
    files = ModelFiles("laid out", pair.directory)
    model = load_model(files, dtype=torch.float32, device=CPU, layout=layout)
    tokens, run = sequence(12, 3), Paged(model, 1)
    logits = [run.step([(0, tokens[:10])]), run.step([(0, tokens[10:11])]), run.step([(0, tokens[11:])])]
    close(torch.cat(logits), pair.expected(tokens))


@pytest.mark.parametrize("order", ["scattered", "consecutive", "two pieces"])
def test_long_rows_attend_wherever_their_pages_lie(pair: Pair, order: str) -> None:
    tokens = [sequence(320, 30), sequence(290, 31), sequence(40, 32)]
    expected = [pair.expected(t) for t in tokens]
    run = Paged(pair.ours, 3, page_size=8, longest=328, order=order)
    run.step([(0, tokens[0][:300]), (1, tokens[1][:280]), (2, tokens[2][:36])])
    for at in range(3):
        rows = [(1, 280 + at), (0, 300 + at), (2, 36 + at)]
        logits = run.step([(i, tokens[i][place : place + 1]) for i, place in rows])
        close(logits, torch.stack([expected[i][place] for i, place in rows]))
    mixed = run.step([(2, tokens[2][39:]), (0, tokens[0][303:]), (1, tokens[1][283:284])])
    close(mixed, torch.cat([expected[2][39:40], expected[0][303:320], expected[1][283:284]]))


def test_a_batch_that_wants_no_logits_still_fills_the_cache(pair: Pair) -> None:
    tokens, run = sequence(20, 4), Paged(pair.ours, 1)
    assert run.step([(0, tokens[:12])], logits=False).shape == (0, 256)
    close(run.step([(0, tokens[12:])]), pair.expected(tokens)[12:])


def test_bfloat16_stays_near_float32(pair: Pair) -> None:
    model = load_model(ModelFiles("half", pair.directory), dtype=torch.bfloat16, device=CPU)
    tokens, run = sequence(24, 5), Paged(model, 1)
    logits = torch.cat([run.step([(0, tokens[:23])]), run.step([(0, tokens[23:])])])
    assert logits.dtype == torch.bfloat16
    expected = pair.expected(tokens)
    assert (logits.float() - expected).abs().max() < 0.05 * expected.abs().max()
