"""The chunking of an engine's nodes: what the model declares and what the deployment makes of it."""

from __future__ import annotations

import inspect
import itertools
import logging
from typing import Any

import pytest

from mstar.engine import chunking
from mstar.engine.chunking import (
    DEFAULT_MIN_CHUNK_TOKENS,
    NO_CHUNKING,
    BudgetOutOfRange,
    ChunkingError,
    ChunkingManagement,
    ChunkingPolicy,
    ChunkRange,
    MixedWalkOverride,
    PoliciesNotSet,
    UnbudgetedWalk,
    UnknownNode,
    UnknownWalk,
)

WALKS = {"llm": ("prefill", "decode"), "vision": ("prefill",), "codec": ("decode",)}
MIXED = {"prefill": "mixed", "decode": "mixed"}
POLICIES = {
    ("llm", "prefill"): ChunkingPolicy(2048, chunkable=True),
    ("llm", "mixed"): ChunkingPolicy(1024, chunkable=True),
    ("llm", "decode"): ChunkingPolicy(None, chunkable=False),
    ("vision", "prefill"): ChunkingPolicy(4096, chunkable=False),
}


class Code:
    """A submodule that can run some walks in chunks."""

    def __init__(self, *walks: str) -> None:
        self.walks = walks

    def chunkable(self, graph_walk: str) -> bool:
        return graph_walk in self.walks


def management(overrides: Any = None, **settings: Any) -> ChunkingManagement:
    made = ChunkingManagement({"llm": Code("prefill", "mixed"), "vision": Code("prefill")})
    made.set_policies(POLICIES)
    settings = {"combined_walk_of": MIXED, **settings}
    made.set_budgets(overrides or {}, WALKS, **settings)
    return made


def refused(kind: type[ChunkingError], overrides: Any, **settings: Any) -> str:
    with pytest.raises(kind) as caught:
        management(overrides, **settings)
    assert caught.type is kind
    return str(caught.value)


# ---- the documented surface ------------------------------------------------------------------------


def test_the_documented_names_have_their_documented_signatures() -> None:
    signatures = {
        "check_budget": "batch node_inputs",
        "chunkable": "node_name graph_walk",
        "forget_request": "rid",
        "max_batch_tokens": "node_name graph_walk",
        "min_chunk_tokens": "budget",
        "policy": "node_name graph_walk",
        "release": "rid node_name",
        "set_budgets": "overrides walks combined_walk_of override_mixed no_chunking min_chunk_tokens",
        "set_policies": "policies",
        "walk_caps": "node_name graph_walk",
    }
    for name, parameters in signatures.items():
        found = inspect.signature(getattr(ChunkingManagement, name)).parameters
        assert " ".join(found).removeprefix("self ") == parameters
    defaults = inspect.signature(ChunkingManagement.set_budgets).parameters
    assert [defaults[name].default for name in list(defaults)[3:]] == [None, (), (), DEFAULT_MIN_CHUNK_TOKENS]
    assert list(inspect.signature(ChunkingManagement).parameters) == ["submodules"]
    assert ChunkRange._fields == ("start", "end", "total", "stride")
    assert set(chunking.__all__) >= {"ChunkRange", "ChunkingManagement", "ChunkingPolicy", "NO_CHUNKING"}


@pytest.mark.behaviour("S4-07")
def test_without_policies_nothing_is_chunked_and_nothing_has_a_budget() -> None:
    made = ChunkingManagement({"llm": Code("prefill")})
    assert not made.chunkable("llm", "prefill")
    assert made.max_batch_tokens("llm", "prefill") is None
    assert made.walk_caps("llm", "mixed") is None
    assert made.prepared == {}


@pytest.mark.behaviour("S4-08")
def test_a_policy_is_the_models_own_or_no_chunking() -> None:
    made = ChunkingManagement({})
    assert made.policy("llm", "prefill") is NO_CHUNKING
    made.set_policies(POLICIES)
    assert made.policy("llm", "prefill") is POLICIES["llm", "prefill"]
    assert made.policy("llm", "other") is NO_CHUNKING
    assert made.policy("codec", "prefill") is NO_CHUNKING


@pytest.mark.behaviour("S4-09")
def test_policies_and_budgets_need_no_submodule() -> None:
    made = ChunkingManagement({})
    made.set_policies(POLICIES)
    made.set_budgets({"llm": {"mixed": 256}}, WALKS, MIXED)
    assert made.policy("llm", "mixed").chunkable
    assert made.max_batch_tokens("llm", "mixed") == 256
    assert not made.chunkable("llm", "mixed")


def test_submodules_may_be_loaded_after_the_policies_are_set() -> None:
    loaded: dict[str, Code] = {}
    made = ChunkingManagement(loaded)
    made.set_policies(POLICIES)
    assert not made.chunkable("llm", "prefill")
    loaded["llm"] = Code("prefill")
    assert made.chunkable("llm", "prefill")


@pytest.mark.behaviour("S4-10")
def test_policies_alone_give_the_declared_budgets() -> None:
    made = ChunkingManagement({})
    made.set_policies(POLICIES)
    budgets = {key: made.max_batch_tokens(*key) for key in POLICIES}
    assert budgets == {key: policy.max_batch_tokens for key, policy in POLICIES.items()}


def test_policies_that_are_bound_again_undo_the_budgets() -> None:
    made = management({"llm": {"mixed": 5}}, no_chunking=("vision",), min_chunk_tokens=2)
    made.set_policies(POLICIES)
    assert made.max_batch_tokens("llm", "mixed") == 1024
    assert made.max_batch_tokens("vision", "prefill") == 4096
    assert made.min_chunk_tokens(4096) == DEFAULT_MIN_CHUNK_TOKENS


# ---- budgets ---------------------------------------------------------------------------------------


@pytest.mark.behaviour("S4-11")
def test_budgets_before_policies_are_an_error() -> None:
    with pytest.raises(PoliciesNotSet, match="set_budgets came before set_policies"):
        ChunkingManagement({}).set_budgets({}, WALKS)


@pytest.mark.behaviour("S4-11")
def test_budgets_start_from_the_declared_ones_each_time() -> None:
    made = management({"llm": 10})
    made.set_budgets({"vision": 20}, WALKS, MIXED)
    assert made.max_batch_tokens("llm", "mixed") == 1024
    assert made.max_batch_tokens("vision", "prefill") == 20


@pytest.mark.behaviour("S4-12")
def test_one_number_for_a_node_is_for_every_walk_that_the_model_budgets_there() -> None:
    made = management({"llm": 300})
    assert made.max_batch_tokens("llm", "prefill") == 300
    assert made.max_batch_tokens("llm", "mixed") == 300
    assert made.max_batch_tokens("llm", "decode") is None
    assert made.max_batch_tokens("vision", "prefill") == 4096


@pytest.mark.behaviour("S4-13")
@pytest.mark.behaviour("S4-19")
def test_a_mapping_is_for_the_walks_that_it_names() -> None:
    made = management({"llm": {"mixed": 300}})
    assert made.max_batch_tokens("llm", "mixed") == 300
    assert made.max_batch_tokens("llm", "prefill") == 2048
    assert made.policy("llm", "mixed").max_batch_tokens == 1024


@pytest.mark.behaviour("S4-14")
def test_null_turns_chunking_off_for_a_walk_or_for_a_node() -> None:
    made = management({"llm": {"mixed": None}})
    assert (made.chunkable("llm", "mixed"), made.max_batch_tokens("llm", "mixed")) == (False, None)
    assert (made.chunkable("llm", "prefill"), made.max_batch_tokens("llm", "prefill")) == (True, 2048)
    made = management({"llm": None})
    for walk in ("prefill", "mixed"):
        assert (made.chunkable("llm", walk), made.max_batch_tokens("llm", walk)) == (False, None)


@pytest.mark.behaviour("S4-15")
@pytest.mark.parametrize("value", [7, None])
def test_a_walk_or_node_without_a_budget_cannot_be_overridden(value: int | None) -> None:
    message = refused(UnbudgetedWalk, {"llm": {"decode": value}}, override_mixed=("llm",))
    assert message.startswith(f"max_batch_tokens.llm.decode is {'null' if value is None else value}, but")
    assert message.endswith("it would do nothing; allowed are mixed, prefill")
    assert refused(UnbudgetedWalk, {"llm": {"decode": value}}).endswith("allowed are mixed")
    assert "max_batch_tokens.codec" in refused(UnbudgetedWalk, {"codec": value})


@pytest.mark.behaviour("S4-16")
def test_a_name_that_nothing_has_is_refused_with_those_that_exist() -> None:
    assert refused(UnknownNode, {"lm": 7}) == (
        "max_batch_tokens.lm is 7, but the model has no node 'lm'; allowed are codec, llm, vision. "
        "Did you mean llm?"
    )
    assert refused(UnknownWalk, {"llm": {"prefil": 7}}) == (
        "max_batch_tokens.llm.prefil is 7, but no walk 'prefil' runs that node; "
        "allowed are decode, mixed, prefill. Did you mean prefill?"
    )
    assert "no_chunking names 'lm'" in refused(UnknownNode, {}, no_chunking=("lm",))
    assert "override_mixed names 'lm'" in refused(UnknownNode, {}, override_mixed=("lm",))
    refused(UnknownWalk, {"vision": {"decode": 7}})


def test_walks_may_be_given_for_all_nodes_at_once() -> None:
    made = ChunkingManagement({"llm": Code("prefill")})
    made.set_policies(POLICIES)
    made.set_budgets({"llm": {"mixed": 9}}, ("prefill", "decode"), MIXED)
    assert made.max_batch_tokens("llm", "mixed") == 9
    with pytest.raises(UnknownWalk):
        made.set_budgets({"llm": {"other": 9}}, ("prefill", "decode"), MIXED)
    with pytest.raises(UnknownNode):
        made.set_budgets({"prefill": 9}, ("prefill", "decode"), MIXED)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "64"])
def test_a_budget_is_a_whole_number_of_tokens(value: Any) -> None:
    assert f"llm is {value!r}; allowed" in refused(BudgetOutOfRange, {"llm": value})
    refused(BudgetOutOfRange, {"llm": {"mixed": value}})
    assert "min_chunk_tokens is" in refused(BudgetOutOfRange, {}, min_chunk_tokens=value)


def test_budgets_that_are_refused_change_nothing() -> None:
    made = management({"llm": 10}, no_chunking=("vision",))
    with pytest.raises(UnknownWalk):
        made.set_budgets({"vision": 5, "llm": {"x": 1}}, WALKS, MIXED, min_chunk_tokens=3)
    assert made.max_batch_tokens("llm", "mixed") == 10
    assert made.max_batch_tokens("vision", "prefill") is None
    assert made.min_chunk_tokens(1000) == DEFAULT_MIN_CHUNK_TOKENS


# ---- combined walks --------------------------------------------------------------------------------


@pytest.mark.behaviour("S4-18")
@pytest.mark.parametrize("value", [7, None])
def test_a_walk_of_a_combined_one_is_refused_with_the_combined_walks_name(value: int | None) -> None:
    message = refused(MixedWalkOverride, {"llm": {"prefill": value}})
    assert message.endswith("set max_batch_tokens.llm.mixed instead")
    assert message.startswith("max_batch_tokens.llm.prefill is")
    management({"llm": {"prefill": 7}}, combined_walk_of=None)


def test_a_walk_is_combined_only_on_nodes_that_run_all_of_its_combined_walk() -> None:
    by_node = lambda node, walk: MIXED[walk] if node == "llm" else None  # noqa: E731
    for combined_walk_of in (MIXED, by_node):
        made = management({"vision": {"prefill": 7}}, combined_walk_of=combined_walk_of)
        assert made.max_batch_tokens("vision", "prefill") == 7
        refused(MixedWalkOverride, {"llm": {"prefill": 7}}, combined_walk_of=combined_walk_of)
        refused(UnknownWalk, {"vision": {"mixed": 7}}, combined_walk_of=combined_walk_of)


@pytest.mark.behaviour("S4-20")
@pytest.mark.behaviour("S4-21")
def test_on_a_node_that_allows_it_a_walks_budget_caps_its_rows_in_mixed_steps() -> None:
    made = management({"llm": {"prefill": 128}}, override_mixed=("llm",))
    assert made.max_batch_tokens("llm", "mixed") == 1024
    assert made.walk_caps("llm", "mixed") == {"prefill": 128}
    assert made.walk_caps("llm", "prefill") is None
    assert made.walk_caps("llm", "decode") is None
    assert made.walk_caps("vision", "mixed") is None


@pytest.mark.behaviour("S4-21")
def test_caps_name_only_walks_with_a_budget_of_their_own() -> None:
    assert management(override_mixed=("llm",)).walk_caps("llm", "mixed") == {"prefill": 2048}
    off = management({"llm": {"prefill": None}}, override_mixed=("llm",))
    assert off.walk_caps("llm", "mixed") == {}
    assert management().walk_caps("llm", "mixed") is None
    assert management(override_mixed=("llm",), no_chunking=("llm",)).walk_caps("llm", "mixed") is None


# ---- chunkable -------------------------------------------------------------------------------------


@pytest.mark.behaviour("S4-24")
@pytest.mark.parametrize(
    ("declared", "able", "on", "allowed"), list(itertools.product((True, False), repeat=4))
)
def test_a_walk_is_chunked_when_model_code_deployment_and_worker_all_agree(
    declared: bool, able: bool, on: bool, allowed: bool
) -> None:
    made = ChunkingManagement({"llm": Code("prefill") if able else Code()})
    made.set_policies({("llm", "prefill"): ChunkingPolicy(512, chunkable=declared)})
    made.set_budgets({"llm": 100 if on else None}, WALKS, no_chunking=() if allowed else ("llm",))
    assert made.chunkable("llm", "prefill") == (declared and able and on and allowed)


@pytest.mark.behaviour("S4-25")
@pytest.mark.parametrize("declared", [512, None])
@pytest.mark.parametrize("override", ["none", 100, None])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_budget_is_the_deployments_else_the_models_else_none(
    declared: int | None, override: Any, allowed: bool
) -> None:
    made = ChunkingManagement({})
    made.set_policies({("llm", "prefill"): ChunkingPolicy(declared, chunkable=True)})
    overrides = {} if override == "none" else {"llm": override}
    if overrides and declared is None:
        with pytest.raises(UnbudgetedWalk):
            made.set_budgets(overrides, WALKS)
        return
    made.set_budgets(overrides, WALKS, no_chunking=() if allowed else ("llm",))
    expected = None if not allowed else declared if override == "none" else override
    assert made.max_batch_tokens("llm", "prefill") == expected


@pytest.mark.behaviour("S4-22")
@pytest.mark.behaviour("S0-02")
def test_nodes_that_are_not_chunked_have_no_budget_either() -> None:
    made = management(no_chunking=("llm",))
    for walk in ("prefill", "mixed", "decode"):
        assert not made.chunkable("llm", walk)
        assert made.max_batch_tokens("llm", walk) is None
    assert made.max_batch_tokens("vision", "prefill") == 4096
    assert made.policy("llm", "prefill").chunkable


@pytest.mark.behaviour("S4-23")
def test_a_budget_for_a_node_that_is_not_chunked_is_checked_and_does_nothing() -> None:
    made = management({"llm": {"mixed": 99}}, no_chunking=("llm",))
    assert made.max_batch_tokens("llm", "mixed") is None
    refused(UnknownWalk, {"llm": {"other": 99}}, no_chunking=("llm",))
    refused(BudgetOutOfRange, {"llm": {"mixed": 0}}, no_chunking=("llm",))
    refused(MixedWalkOverride, {"llm": {"prefill": 9}}, no_chunking=("llm",))


@pytest.mark.behaviour("S0-03")
def test_each_node_that_is_not_chunked_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    policies = {(node, "prefill"): ChunkingPolicy(64, chunkable=True) for node in ("a", "b", "c")}
    policies["d", "prefill"] = ChunkingPolicy(64, chunkable=False)
    made = ChunkingManagement({})
    made.set_policies(policies)
    with caplog.at_level(logging.INFO, "mstar.engine.chunking"):
        made.set_budgets({}, ("prefill",), no_chunking=("a", "c", "d"))
        made.set_budgets({}, ("prefill",), no_chunking={"b": "its group has sp_size 2"})
    told = [record.getMessage() for record in caplog.records]
    assert [message.partition(":")[0] for message in told] == [
        f"node {node} is not chunked and runs every prompt in one step" for node in ("a", "c", "b")
    ]
    assert "sequence parallelism" in told[0]
    assert told[2].endswith(": its group has sp_size 2")


@pytest.mark.behaviour("S0-42")
def test_one_node_may_have_walks_that_are_chunked_and_walks_that_are_not() -> None:
    made = ChunkingManagement({"llm": Code("text", "image")})
    made.set_policies(
        {
            ("llm", "text"): ChunkingPolicy(512, chunkable=True),
            ("llm", "image"): ChunkingPolicy(2048, chunkable=False),
        }
    )
    made.set_budgets({"llm": 256}, {"llm": ("text", "image")})
    assert (made.chunkable("llm", "text"), made.chunkable("llm", "image")) == (True, False)
    assert made.max_batch_tokens("llm", "image") == 256
    made.set_budgets({"llm": {"text": None}}, {"llm": ("text", "image")})
    assert (made.chunkable("llm", "text"), made.max_batch_tokens("llm", "image")) == (False, 2048)


# ---- floors ----------------------------------------------------------------------------------------


@pytest.mark.behaviour("S4-26")
@pytest.mark.parametrize(
    ("floor", "budget", "least"), [(64, 1024, 64), (64, 64, 64), (64, 63, 63), (1, 9, 1)]
)
def test_the_smallest_chunk_is_the_floor_or_the_whole_budget(floor: int, budget: int, least: int) -> None:
    assert management(min_chunk_tokens=floor).min_chunk_tokens(budget) == least


@pytest.mark.behaviour("S4-28")
def test_the_floor_has_a_default() -> None:
    assert management().min_chunk_tokens(10**6) == DEFAULT_MIN_CHUNK_TOKENS
    assert ChunkingManagement({}).min_chunk_tokens(10**6) == DEFAULT_MIN_CHUNK_TOKENS
