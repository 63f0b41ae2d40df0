"""The choice for a CPU, decided from figures instead of a clock."""

from __future__ import annotations

import pytest
import torch

from mstar.distributed.matmul import Layout
from mstar.model import choose
from mstar.model.choose import CpuChoice, choose_cpu, choose_layout, decide, thread_counts
from mstar.model.spec import ModelSpec

F32, BF16 = torch.float32, torch.bfloat16
SPEC = ModelSpec(
    family="llama",
    vocab_size=512,
    hidden_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_size=128,
    max_position=64,
    rope_theta=1e4,
    rms_eps=1e-5,
    tied=True,
)


def test_one_core_is_left_to_the_gateway() -> None:
    assert [thread_counts(cores) for cores in (1, 2, 3, 4, 8)] == [[1], [1], [1, 2], [1, 2, 3], [1, 2, 4, 7]]


def test_nothing_is_timed_where_there_is_no_choice() -> None:
    def seconds(dtype: torch.dtype, threads: int) -> float:
        raise AssertionError("timed")

    assert decide([F32], [1], seconds) == (F32, 1)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({(F32, 1): 1.0, (F32, 2): 0.6, (F32, 4): 0.55, (BF16, 2): 0.58}, (F32, 2)),
        ({(F32, 1): 1.0, (F32, 2): 3.0, (F32, 4): 9.0, (BF16, 1): 0.5}, (BF16, 1)),
        ({(F32, 1): 1.0, (F32, 2): 0.9, (F32, 4): 0.4, (BF16, 4): 0.2}, (BF16, 4)),
    ],
)
def test_more_threads_and_fewer_bits_have_to_be_worth_it(
    figures: dict[tuple[torch.dtype, int], float], expected: tuple[torch.dtype, int]
) -> None:
    assert decide([F32, BF16], [1, 2, 4], lambda dtype, threads: figures[dtype, threads]) == expected


def test_the_second_copy_of_weights_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    second = (2 * 2 * 128 + 512) * 64 * 4
    monkeypatch.setattr(choose, "_available", lambda: 8 * second)
    assert choose_layout(SPEC, F32) is Layout.COLUMNS_AND_BLOCKS
    monkeypatch.setattr(choose, "_available", lambda: 8 * second - 1)
    assert choose_layout(SPEC, F32) is Layout.COLUMNS


def test_a_choice_is_made_once_and_leaves_the_threads_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_cpu.cache_clear()
    before = torch.get_num_threads()
    monkeypatch.setattr(choose, "_STREAMED", 0)
    monkeypatch.setattr(choose, "thread_counts", lambda cores: [1, 2])
    choice = choose_cpu(SPEC)
    assert isinstance(choice, CpuChoice)
    assert torch.get_num_threads() == before
    assert choose_cpu(SPEC) is choice
    choose_cpu.cache_clear()
