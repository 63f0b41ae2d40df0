"""A deployment's budgets over a model's graph: the chunking of the model's nodes, ready to be asked."""

from __future__ import annotations

from collections.abc import Mapping

from mstar.config.budgets import budget_overrides, check_rows
from mstar.config.load import ConfigError
from mstar.config.schema import Deployment
from mstar.engine.chunking import (
    DEFAULT_MIN_CHUNK_TOKENS,
    ChunkingError,
    ChunkingManagement,
    SubmoduleManagement,
)
from mstar.graph.model import ModelGraph

__all__ = ["chunking_of"]


def chunking_of(
    deployment: Deployment,
    graph: ModelGraph,
    submodules: Mapping[str, SubmoduleManagement],
    no_chunking: Mapping[str, str] | None = None,
) -> ChunkingManagement:
    """The chunking of ``graph``'s nodes as ``deployment`` wants it.

    ``submodules`` are those of the engine; none are needed to find out whether the deployment fits the
    model. ``no_chunking`` is what ``place`` found: node -> why it is not chunked. Raises ConfigError for a
    node or walk that the model does not have or does not budget, and for a step that rows decode in with
    less room than a token for each.
    """
    policies = graph.chunking_policies
    budgeted: dict[str, list[str]] = {node: [] for node in graph.nodes}
    for (node, walk), policy in policies.items():
        if policy.max_batch_tokens is not None:
            budgeted[node].append(walk)
    decoding = {node: [walk for walk in walks if walk in graph.combined] for node, walks in budgeted.items()}
    overrides = budget_overrides(deployment.max_batch_tokens, budgeted)
    check_rows(deployment.max_batch_tokens, deployment.max_num_seqs, decoding)
    made = ChunkingManagement(submodules)
    made.set_policies(policies)
    try:
        made.set_budgets(
            overrides,
            {node: graph.walks_of(node) for node in graph.nodes},
            graph.combined_walk_of,
            {node for (node, _), policy in policies.items() if policy.can_override_mixed_max_tokens},
            no_chunking or {},
            deployment.min_chunk_tokens or DEFAULT_MIN_CHUNK_TOKENS,
        )
    except ChunkingError as error:
        raise ConfigError(str(error)) from error
    return made
