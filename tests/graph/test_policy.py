"""The policies that a model declares."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from mstar.graph.errors import GraphError
from mstar.graph.policy import NO_CHUNKING, ChunkingPolicy


def test_no_chunking_chunks_nothing_and_sets_no_budget() -> None:
    assert not NO_CHUNKING.chunkable
    assert NO_CHUNKING.max_batch_tokens is None
    assert not NO_CHUNKING.per_chunk_outputs
    assert not NO_CHUNKING.can_override_mixed_max_tokens


def test_a_policy_cannot_be_changed_after_the_graph_was_built_from_it() -> None:
    policy = ChunkingPolicy(512, True)
    with pytest.raises(FrozenInstanceError):
        policy.chunkable = False  # type: ignore[misc]


def test_a_budget_below_one_token_is_refused() -> None:
    with pytest.raises(GraphError, match=r"max_batch_tokens .* is 0; give 1 or more"):
        ChunkingPolicy(0, True)
