"""What a deployment makes of a language model's node: where it lives, how it is chunked, what bounds it.

From the deployment and facts that are the same on every rank; the engine, the composition of a daemon and the
simulator ask here, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mstar.config.schema import Deployment
from mstar.engine.budgets import chunking_of
from mstar.engine.chunking import ChunkingManagement
from mstar.model.graphs import COMBINED, DEFAULT_MAX_BATCH_TOKENS, LLM, PREFILL, language_model
from mstar.validation.placement import NodeFacts, Placement, place
from mstar.validation.request import MAX_SEQUENCES
from mstar.worker.limits import Limits

__all__ = ["Sizing", "limits_of", "sizing_of"]


class Sizing(NamedTuple):
    """Where the nodes are placed, and how they are chunked."""

    placement: Placement
    chunking: ChunkingManagement


class _Anywhere:
    """The node's say: a prompt may be cut anywhere."""

    def chunkable(self, graph_walk: str) -> bool:
        return True


def sizing_of(deployment: Deployment, *, batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS) -> Sizing:
    """What ``deployment`` says of a language model whose own budget is ``batch_tokens``.

    Raises PlacementInvalid and ConfigError for what does not fit the model's graph.
    """
    graph = language_model(batch_tokens)
    nodes = {node: NodeFacts(graph.walks_of(node)) for node in graph.nodes}
    placement = place(deployment.node_groups, nodes, tensor_parallel_size=deployment.tensor_parallel_size)
    return Sizing(placement, chunking_of(deployment, graph, {LLM: _Anywhere()}, placement.no_chunking))


def limits_of(
    deployment: Deployment,
    chunking: ChunkingManagement,
    *,
    window: int,
    pages: int,
    batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS,
) -> Limits:
    """What bounds the node, with room for ``pages`` pages and sequences of ``window`` tokens.

    A budget that the deployment gives to prefill itself caps it beside decodes; the model's own does not.
    """
    slots = deployment.max_num_seqs
    budget = max(chunking.max_batch_tokens(LLM, COMBINED) or batch_tokens, slots)
    chunked = chunking.chunkable(LLM, PREFILL)
    cap = (chunking.walk_caps(LLM, COMBINED) or {}).get(PREFILL, 0) if _named(deployment) else 0
    return Limits(
        slots=slots,
        max_seq_len=window,
        pages=pages,
        page_size=deployment.page_size,
        batch_tokens=budget,
        min_chunk_tokens=chunking.min_chunk_tokens(budget),
        depth=deployment.pipeline_depth,
        max_waiting=2 * max(deployment.max_concurrent_requests, slots) + MAX_SEQUENCES,
        chunked=chunked,
        prefix_cache=deployment.prefix_cache,
        prefill_cap=cap if chunked and cap < budget else 0,
        target_itl_ns=round((deployment.target_itl_ms or 0) * 1e6),
    )


def _named(deployment: Deployment) -> bool:
    """Whether the deployment gives the prefill walk a budget of its own."""
    budgets = deployment.max_batch_tokens
    of_node = budgets.get(LLM) if isinstance(budgets, Mapping) else None
    return isinstance(of_node, Mapping) and PREFILL in of_node
