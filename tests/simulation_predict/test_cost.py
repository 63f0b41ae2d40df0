"""Costs: what they say of a step, how they are kept, and that the presets agree with what was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from mstar.config.load import ConfigError
from mstar.simulation.cost import (
    Collective,
    Cost,
    CostTable,
    Host,
    ModelFacts,
    decode_cost,
    encode_cost,
    read_cost,
)
from mstar.simulation.presets import find_cost, preset, preset_names
from mstar.worker.budget import StepWork

FACTS = ModelFacts("toy", 4096, 64)
TABLE = CostTable(
    FACTS,
    tokens=(1, 8, 64),
    tokens_ns=(1000.0, 1700.0, 12900.0),
    row_ns=10.0,
    read_ns=2.0,
    past_ns=3.0,
    own_ns=5.0,
    host=Host(step_ns=40, row_ns=2),
    collective=Collective(step_ns=500, token_ns=1),
)


def decodes(rows: int, length: int) -> StepWork:
    return StepWork(rows, rows, rows * length)


def chunk(tokens: int, start: int) -> StepWork:
    return StepWork(tokens, 1, tokens * (start + tokens))


def test_a_table_is_linear_between_its_knots_and_beyond_the_last() -> None:
    assert TABLE.ns(decodes(1, 0), 1) == 1010
    assert TABLE.ns(decodes(8, 0), 1) == 1700 + 80
    assert TABLE.ns(decodes(36, 0), 1) == (1700 + 12900) / 2 + 360
    assert TABLE.ns(decodes(128, 0), 1) == 12900 + 64 * 200 + 1280


def test_decodes_pay_for_what_they_read_and_chunks_for_pairs_before_and_inside() -> None:
    assert TABLE.ns(decodes(8, 100), 1) == 1780 + 800 * 2
    assert TABLE.ns(chunk(8, 0), 1) == 1700 + 10 + 32 * 5
    assert TABLE.ns(chunk(8, 100), 1) == 1700 + 10 + 32 * 5 + 800 * 3


def test_ranks_divide_all_but_the_fixed_part_and_pay_for_meeting() -> None:
    alone, pair = TABLE.ns(decodes(8, 100), 1), TABLE.ns(decodes(8, 100), 2)
    assert pair == 1000 + (alone - 1000) / 2 + 500 + 8


def test_a_step_without_rows_costs_nothing_and_the_host_pays_by_row() -> None:
    assert TABLE.ns(StepWork(0, 0, 0), 1) == 0
    assert TABLE.host_ns(decodes(8, 1), 1) == 56


@pytest.mark.parametrize("cost", [TABLE, *(preset(name) for name in preset_names())])
def test_a_cost_comes_back_from_its_file_as_it_was(cost: Cost, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_bytes(encode_cost(cost))
    assert read_cost(file) == cost


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": [1]}, "two or more"),
        ({"tokens": [1, 8, 8]}, "do not rise"),
        ({"tokens_ns": [3.0, 2.0, 9.0]}, "costs less"),
        ({"row_ns": -1}, "row_ns"),
        ({"colour": 1}, "colour"),
        ({"kind": "guess"}, "guess"),
    ],
)
def test_a_broken_cost_is_told_in_one_sentence(change: dict[str, object], words: str) -> None:
    plain = msgspec.json.decode(encode_cost(TABLE)) | change
    with pytest.raises(ConfigError, match=f"the file is no cost: .*{words}"):
        decode_cost(msgspec.json.encode(plain), "the file")


def test_what_does_not_exist_is_told_with_what_does(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        find_cost(str(tmp_path / "none.json"), "x")
    with pytest.raises(ConfigError, match="h200-qwen3-8b"):
        find_cost("h100", "x")
    with pytest.raises(ConfigError, match="no cost is known for the model x"):
        find_cost(None, "x")


def test_the_default_model_has_a_cost_near_its_measured_steps() -> None:
    cost = find_cost(None, "smollm2-135m-instruct")
    found = {rows: cost.ns(decodes(rows, 128), 1) / 1e6 for rows in (1, 16)}
    assert found == pytest.approx({1: 48.5, 16: 162}, rel=0.15)
    assert cost.host.inline


def test_a_model_has_its_preset_by_name() -> None:
    assert find_cost(None, "Qwen/Qwen3-8B") is preset("h200-qwen3-8b")


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [
        ("h200-qwen3-8b", {1: 5.14, 32: 6.24, 64: 7.35, 256: 15.1}),
        ("h200-qwen3-0.6b", {1: 1.54, 32: 2.15, 64: 2.95, 256: 7.36}),
        ("h200-qwen3.5-0.8b", {1: 1.45, 32: 1.81, 256: 5.0}),
    ],
)
def test_a_preset_is_within_a_tenth_of_the_measured_decode_steps(
    name: str, milliseconds: dict[int, float]
) -> None:
    found = {rows: preset(name).ns(decodes(rows, 768), 1) / 1e6 for rows in milliseconds}
    assert found == pytest.approx(milliseconds, rel=0.1)


def test_the_preset_of_8b_prefills_as_fast_as_was_measured() -> None:
    cost = preset("h200-qwen3-8b")
    steps = [StepWork(2048, 17, 2032 * (start + 2032) + 16 * 700) for start in range(0, 16384, 2032)]
    seconds = sum(cost.ns(work, 1) for work in steps) / 1e9
    assert 2032 * len(steps) / seconds == pytest.approx(30_700, rel=0.05)


@pytest.mark.parametrize("name", preset_names())
def test_more_work_never_costs_less_and_two_ranks_are_faster_at_long_steps(name: str) -> None:
    cost = preset(name)
    sizes = (2, 7, 16, 64, 200, 512, 2048, 8192)
    times = [cost.ns(chunk(tokens, 1000), 1) for tokens in sizes]
    assert times == sorted(times)
    assert cost.ns(chunk(8192, 0), 2) < cost.ns(chunk(8192, 0), 1)
