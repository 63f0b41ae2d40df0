"""One number, off, or a mapping: what reaches the nodes of a model."""

from __future__ import annotations

import pytest

from mstar.config.budgets import budget_overrides, check_rows
from mstar.config.load import ConfigError

BUDGETED = {"llm": ("prefill", "mixed"), "vision": ("prefill",), "detokenizer": ()}


@pytest.mark.behaviour("S4-12")
def test_one_number_is_for_every_node_that_the_model_budgets() -> None:
    assert budget_overrides(512, BUDGETED) == {"llm": 512, "vision": 512}


@pytest.mark.behaviour("S4-14")
def test_off_is_for_every_node_that_the_model_budgets() -> None:
    assert budget_overrides("off", BUDGETED) == {"llm": None, "vision": None}


def test_no_setting_overrides_nothing() -> None:
    assert budget_overrides(None, BUDGETED) == {}


@pytest.mark.behaviour("S4-13")
def test_a_mapping_is_taken_as_it_is() -> None:
    budgets = {"llm": {"prefill": 64, "mixed": None}, "vision": 32}
    assert budget_overrides(budgets, BUDGETED) == budgets


@pytest.mark.behaviour("S4-16")
def test_a_node_that_the_model_does_not_have_is_named_with_those_it_has() -> None:
    with pytest.raises(ConfigError) as caught:
        budget_overrides({"lm": {"prefill": 64}}, BUDGETED)
    assert str(caught.value) == (
        "max_batch_tokens.lm is {'prefill': 64}, but the model has no node 'lm'; "
        "allowed are detokenizer, llm, vision"
    )


def test_a_step_that_rows_decode_in_has_a_token_for_each() -> None:
    decoding = {"llm": ("mixed",)}
    for fine in (None, "off", 8, {"llm": 8}, {"llm": {"mixed": 8, "prefill": 1}}, {"llm": None, "vision": 1}):
        check_rows(fine, 8, decoding)  # type: ignore[arg-type]
    for small, path in (({"llm": 7}, "llm is 7"), ({"llm": {"mixed": 7}}, "llm.mixed is 7")):
        with pytest.raises(ConfigError, match=f"max_batch_tokens.{path}, less than max_num_seqs, which is 8"):
            check_rows(small, 8, decoding)  # type: ignore[arg-type]
