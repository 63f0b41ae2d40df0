"""The bench of the target ITL prints what each budget leaves."""

from __future__ import annotations

import pytest

from tools.bench.target_itl import Costs, Load, drive, main, throughput

COSTS = Costs(fixed_us=1000, weights_us=2000, token_us=10, decode_context_ns=0, chunk_context_ns=0)


def test_a_row_for_every_budget_and_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--costs", "h200-small", "--length", "4000", "--prompts", "2"]) == 0
    names = [line.partition("|")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert names[3:] == [
        "whole prompts",
        *(f"budget {tokens}" for tokens in (8192, 2048, 512, 128)),
        *(f"target {target} ms" for target in (5, 10, 20)),
    ]


def test_steps_take_what_the_formula_says() -> None:
    steps = drive(COSTS, Load(4, 100, (1000,)), lambda _: 504)
    assert [step.chunk_tokens for step in steps] == [500, 500]
    assert [step.took_ns for step in steps] == [6.04e6, 6.04e6]
    assert throughput(steps) == pytest.approx(1000 / 12.08e-3)


def test_prompts_that_could_never_run_are_an_error() -> None:
    with pytest.raises(ValueError, match="leaves 46 tokens to them, the floor is 64"):
        drive(COSTS, Load(4, 100, (1000,)), lambda _: 50)
