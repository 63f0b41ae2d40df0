"""LanguageModelRunner: inputs are prepared once, cut by chunk, and held until the last chunk has landed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mstar.messages.tokens import LENGTH
from tests.worker.local_rank import LocalRank, Prompt

PROMPT = Prompt(tuple(np.random.default_rng(1).integers(3, 250, 100).tolist()), 4)


def rank(directory: Path, **settings: object) -> LocalRank:
    common = {"dtype": "float32", "threads": 1, "kv_cache_bytes": 1 << 20, "max_num_seqs": 4}
    return LocalRank(directory, **{**common, "max_batch_tokens": 16, **settings})


@pytest.mark.behaviour("S0-19")
@pytest.mark.parametrize("budget", [16, 64, "off"])
def test_an_input_is_prepared_once_however_many_chunks_it_runs_in(
    tiny_model_dir: Path, budget: object
) -> None:
    local = rank(tiny_model_dir, max_batch_tokens=budget)
    local.generate([PROMPT, PROMPT._replace(tokens=PROMPT.tokens[:70])])
    assert local.engine.runner.statistics().prepared == 2


@pytest.mark.behaviour("S0-13")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_input_is_held_from_its_first_chunk_until_its_last_has_landed(
    tiny_model_dir: Path, depth: int
) -> None:
    local = rank(tiny_model_dir, pipeline_depth=depth)
    held: list[tuple[int, int]] = []
    forward = local.engine.runner._run

    def noted(plan: object, results: object) -> None:
        forward(plan, results)  # type: ignore[arg-type]
        starts = plan.chunk_starts  # type: ignore[attr-defined]
        held.append((int(starts.max()) if starts.size else -1, local.engine.runner.statistics().held))

    local.engine.runner._run = noted  # type: ignore[method-assign]
    local.generate([PROMPT])
    chunks = [count for start, count in held if start >= 0]
    assert chunks == [1] * 7
    # The chunk that ends the input has landed `depth` launches later at the latest, and it is let go.
    assert [count for start, count in held if start < 0][depth:] == [0] * (PROMPT.max_tokens - 1 - depth)
    assert local.engine.runner.statistics().held == 0


def test_a_prompt_whose_beginning_is_cached_runs_from_there_on_its_own_places(tiny_model_dir: Path) -> None:
    local = rank(tiny_model_dir)
    longer = PROMPT._replace(tokens=(*PROMPT.tokens, 7, 8, 9))
    fresh = rank(tiny_model_dir, prefix_cache=False).generate([longer])[0].tokens
    local.generate([PROMPT])
    before = local.engine.runner.statistics().tokens
    assert local.generate([longer])[0].tokens == fresh
    assert local.engine.runner.statistics().tokens - before == 103 - 96 + longer.max_tokens - 1


def test_a_token_that_the_vocabulary_does_not_have_fails_its_row_alone(tiny_model_dir: Path) -> None:
    local = rank(tiny_model_dir)
    wrong = PROMPT._replace(tokens=(5, 100_000, 6))
    bad, good = local.generate([wrong, PROMPT])
    assert "token id 100000" in bad.failed[0].message
    assert (bad.tokens, good.finish) == ([], [LENGTH])
    assert local.engine.runner.statistics().held == 0
