"""What ranks settle before they load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mstar.distributed.matmul import Layout
from mstar.model.choose import CpuChoice
from mstar.worker.agreement import ConfigMismatch, check_alike, model_identity, settle_choice
from tests.distributed.groups import meeting


def test_every_rank_computes_as_the_first_one_chose() -> None:
    chosen = CpuChoice(torch.bfloat16, 3, Layout.COLUMNS)
    found = meeting(3, lambda ranks: settle_choice(ranks, chosen if ranks.shard.rank == 0 else None))
    assert found == [chosen] * 3


@pytest.mark.behaviour("S0-35")
def test_the_rank_and_the_fact_that_differ_are_named_with_both_values() -> None:
    def told(rank: int) -> dict[str, str]:
        return {"limits": "64 slots" if rank != 2 else "32 slots", "model": "abc"}

    def compare(ranks: object) -> str:
        with pytest.raises(ConfigMismatch) as failed:
            check_alike(ranks, told(ranks.shard.rank))  # type: ignore[attr-defined, arg-type]
        return str(failed.value)

    found = meeting(3, compare)
    sentence = "the limits of rank 2 is 32 slots, that of its leader, rank 0, is 64 slots; "
    assert all(text.startswith(sentence) for text in found)


def test_ranks_that_were_told_the_same_go_on() -> None:
    assert meeting(2, lambda ranks: check_alike(ranks, {"model": "abc"})) == [None, None]


def test_a_model_is_another_one_when_a_file_has_changed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = model_identity(tmp_path)
    assert model_identity(tmp_path) == before
    (tmp_path / "config.json").write_text("{ }")
    assert model_identity(tmp_path) != before
