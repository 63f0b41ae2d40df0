"""Tensor parallelism changes no token, whatever the family, prompts, budget, prefix cache and depth.

"The same tokens" is exact but for one excuse: a greedy choice between two logits that lie within 1e-4 of
each other may fall either way, since sums over ranks round differently. The comparison of that sequence
ends there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from mstar.messages.request import Sampling
from mstar.messages.tokens import LENGTH
from tests.model.runs import FAMILIES, reference
from tests.worker.local_rank import Answer, LocalRank, Prompt
from tests.worker.pairwise import pairwise
from tests.worker.tp_cell import Cell, Job, Ran

pytestmark = pytest.mark.timeout(120)

WINDOW = 2304
CLOSE = 1e-4
MOST_EXCUSED = 0.01
SETTINGS: dict[str, Any] = {"max_num_seqs": 6, "kv_cache_bytes": 24 << 20, "max_seq_len": 2100}
LENGTHS = {"short": (1, 5, 17, 40), "medium": (250, 3, 129, 64), "long": (2000, 30)}
FACTORS: dict[str, tuple[Any, ...]] = {
    "world": (2, 4),
    "family": tuple(sorted(FAMILIES)),
    "budget": (16, 64, 256, "off"),
    "depth": (0, 1, 2),
    "lengths": tuple(LENGTHS),
    "prefix": (True, False),
}


class Reference(NamedTuple):
    """What one rank gives for each prompt alone, and how far apart the best two logits were at each token."""

    tokens: list[list[int]]
    gaps: list[list[float]]


def prompts(lengths: tuple[int, ...], *, seed: int = 1, vocab: int = 256, count: int = 8) -> list[Prompt]:
    """Prompts of these lengths, and one that begins like the first: a prefix cache has something to find."""
    rng = np.random.default_rng(seed)
    drawn = [tuple(rng.integers(3, vocab, length).tolist()) for length in lengths]
    drawn.append((*drawn[0], *drawn[-1][:9]))
    return [Prompt(tokens, count) for tokens in drawn]


def scored(prompt: Prompt) -> Prompt:
    return prompt._replace(sampling=msgspec.structs.replace(prompt.sampling, logprobs=2))


def alone(rank: LocalRank, asked: list[Prompt]) -> Reference:
    answers = [rank.generate([scored(prompt)])[0] for prompt in asked]
    gaps = []
    for answer in answers:
        tops = [sorted(tops.values())[-2:] for _, tops in answer.scores]
        gaps.append([best - second for second, best in tops])
    return Reference([answer.tokens for answer in answers], gaps)


def same(found: list[Answer], expected: Reference) -> int:
    """Check every answer against the reference; the number of answers that are excused."""
    excused = 0
    for answer, tokens, gaps in zip(found, expected.tokens, expected.gaps, strict=True):
        assert (answer.finish, answer.failed) == ([LENGTH], [])
        pairs = zip(answer.tokens, tokens, gaps, strict=True)
        first = next((at for at, (ours, theirs, _) in enumerate(pairs) if ours != theirs), None)
        if first is not None:
            assert gaps[first] <= CLOSE, f"token {first} is {answer.tokens[first]}, not {tokens[first]}"
            excused += 1
    return excused


def alike(ran: Ran) -> None:
    """Every rank ran the same ranges in the same order over the same page tables, and holds nothing."""
    leader, *followers = ran.books
    assert all(books.log == leader.log for books in followers)
    assert [(books.bound, books.pages, books.held_inputs) for books in ran.books] == [(0, 0, 0)] * len(
        ran.books
    )
    ledger = ran.ledger
    assert ledger["free"] + ledger["cached"] == ledger["total"]
    assert ledger["held"] == ledger["promised"] == ledger["leased"] == 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of every family, with a window for the longest prompts."""
    found = {}
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(family)
        reference(family, directory)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": WINDOW}))
        found[family] = directory
    return found


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> dict[tuple[str, str], Reference]:
    found = {}
    for family, directory in models.items():
        rank = LocalRank(
            directory, dtype="float32", threads=1, pipeline_depth=0, max_batch_tokens="off", **SETTINGS
        )
        for name, lengths in LENGTHS.items():
            found[family, name] = alone(rank, prompts(lengths))
    return found


@pytest.fixture(scope="module")
def cells() -> Iterator[dict[int, Cell]]:
    """A cell of each size, which all combinations share."""
    with Cell(2) as two, Cell(4) as four:
        yield {2: two, 4: four}


def check(
    cells: dict[int, Cell],
    models: dict[str, Path],
    references: dict[tuple[str, str], Reference],
    combinations: list[dict[str, Any]],
) -> None:
    """Run every combination; at most one sequence in a hundred may be excused."""
    excused = count = 0
    for at, chosen in enumerate(combinations):
        cell = cells[chosen["world"]]
        cell.build(
            models[chosen["family"]],
            max_batch_tokens=chosen["budget"],
            pipeline_depth=chosen["depth"],
            prefix_cache=chosen["prefix"],
            **SETTINGS,
        )
        asked = prompts(LENGTHS[chosen["lengths"]])
        ran = cell.run(Job(asked, stagger=(0, 3)[at % 2]))
        alike(ran)
        excused += same(ran.answers, references[chosen["family"], chosen["lengths"]])
        count += len(asked)
    assert excused <= MOST_EXCUSED * count


@pytest.mark.behaviour("S0-01", "S0-10", "S0-11", "S0-14", "S0-20", "S0-25", "S0-31", "S0-34", "S0-36")
def test_two_and_four_ranks_give_the_tokens_of_one(
    cells: dict[int, Cell], models: dict[str, Path], references: dict[tuple[str, str], Reference]
) -> None:
    check(cells, models, references, pairwise(FACTORS))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_combination_gives_the_tokens_of_one_rank(
    cells: dict[int, Cell], models: dict[str, Path], references: dict[tuple[str, str], Reference]
) -> None:
    every = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    check(cells, models, references, every)


@pytest.mark.behaviour("S0-32", "S0-33")
@pytest.mark.parametrize("depth", [0, 2])
def test_sampled_tokens_do_not_change_with_chunking_or_ranks(
    cells: dict[int, Cell], models: dict[str, Path], depth: int
) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=40)
    asked = [
        prompt._replace(sampling=msgspec.structs.replace(sampling, seed=seed))
        for seed, prompt in enumerate(prompts((1, 90, 301), count=16))
    ]
    directory = models["qwen3"]
    one = LocalRank(directory, dtype="float32", threads=1, max_batch_tokens="off", **SETTINGS)
    expected = [answer.tokens for answer in one.generate(asked)]
    for budget in (16, 100, "off"):
        cells[2].build(directory, max_batch_tokens=budget, pipeline_depth=depth, **SETTINGS)
        ran = cells[2].run(Job(asked, stagger=2))
        alike(ran)
        assert [answer.tokens for answer in ran.answers] == expected


@pytest.mark.behaviour("S0-19", "S0-24", "S0-95")
def test_a_prompt_sent_again_skips_its_cached_pages_on_every_rank(
    cells: dict[int, Cell], models: dict[str, Path]
) -> None:
    (prompt, *_) = prompts((700,))
    cell = cells[4]
    cell.build(models["llama"], max_batch_tokens=64, **SETTINGS)
    first = cell.run(Job([prompt]))
    again = cell.run(Job([prompt]))
    assert again.answers[0].tokens == first.answers[0].tokens
    assert again.ledger["cached_tokens"] == 699 // 16 * 16
    for books, before in zip(again.books, first.books, strict=True):
        chunked = [entry for entry in books.log if entry[4]]
        # It starts at the planned place, past the leased pages, and its Loop's counter at 0 all the same.
        assert [entry[3:6] for entry in chunked] == [((0,), (688,), (700,))]
        assert books.prepared - before.prepared == 1
    alike(again)


@pytest.mark.long
@pytest.mark.behaviour("S0-21")
def test_a_small_pool_under_two_ranks_preempts_rows_and_changes_no_token(
    cells: dict[int, Cell], models: dict[str, Path]
) -> None:
    settings = {**SETTINGS, "max_num_seqs": 4, "max_seq_len": 336, "max_batch_tokens": 64}
    page_bytes = 3 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, tokens, head_dim, float32
    asked = prompts((7, 12), count=272)
    cell = cells[2]
    cell.build(models["llama"], **settings)
    roomy = cell.run(Job(asked))
    cell.build(models["llama"], **{**settings, "kv_cache_bytes": 35 * page_bytes})
    tight = cell.run(Job(asked))
    assert tight.ledger["total"] == 35
    assert tight.ledger["preempted"] > roomy.ledger["preempted"] == 0
    alike(tight)
    assert [answer.tokens for answer in tight.answers] == [answer.tokens for answer in roomy.answers]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.behaviour("S0-31")
@pytest.mark.parametrize("budget", [16, 64, 256, "off"])
def test_three_ranks_of_the_real_model_give_the_tokens_of_one(model_dir: Path, budget: int | str) -> None:
    settings = {"max_num_seqs": 8, "kv_cache_bytes": 512 << 20, "max_seq_len": 2100}
    asked = prompts((1, 40, 333, 2000), vocab=40_000, count=24)
    one = LocalRank(
        model_dir, dtype="float32", threads=1, pipeline_depth=0, max_batch_tokens="off", **settings
    )
    expected = alone(one, asked)
    excused = 0
    with Cell(3) as cell:
        for depth, prefix in product((0, 1, 2), (True, False)):
            cell.build(
                model_dir, max_batch_tokens=budget, pipeline_depth=depth, prefix_cache=prefix, **settings
            )
            ran = cell.run(Job(asked, stagger=2))
            alike(ran)
            excused += same(ran.answers, expected)
    assert excused <= 1
