"""What a deployment means to the simulator: limits and ranks, as the engine would set them for this cost."""

from __future__ import annotations

from typing import NamedTuple

from mstar.config.load import ConfigError, Resolved
from mstar.config.schema import Deployment
from mstar.engine.budgets import chunking_of
from mstar.engine.chunking import ChunkingManagement
from mstar.model.graphs import COMBINED, LLM, PREFILL, language_model
from mstar.simulation.cost import ModelFacts
from mstar.simulation.workloads import Job
from mstar.validation.placement import NodeFacts, PlacementInvalid, place
from mstar.validation.request import MAX_SEQUENCES
from mstar.worker.limits import Limits

__all__ = ["Setting", "check_fits", "setting_of"]


class Setting(NamedTuple):
    """One node of a causal language model on ``ranks`` ranks in lockstep; ``capacity`` requests at once."""

    limits: Limits
    ranks: int
    capacity: int


def setting_of(resolved: Resolved, facts: ModelFacts) -> Setting:
    """The limits that ``resolved`` gives a model of these facts. Raises ConfigError where they cannot be.

    Where no cache is asked for by name, it has the size that the facts give the device.
    """
    deployment = resolved.deployment
    chunking, ranks = _chunking(deployment, facts)
    cache_bytes = deployment.kv_cache_bytes
    if facts.cache_bytes and resolved.sources.get("kv_cache_bytes", "default") == "default":
        cache_bytes = facts.cache_bytes
    window = min(deployment.max_seq_len or facts.window, facts.window)
    pages = cache_bytes * ranks // (facts.kv_token_bytes * deployment.page_size)
    if pages * deployment.page_size < window:
        raise ConfigError(
            f"kv_cache_bytes {cache_bytes} holds {pages * deployment.page_size} tokens of {facts.name}, one "
            f"sequence of max_seq_len {window} needs more: raise --kv-cache-bytes or lower --max-model-len"
        )
    budget = chunking.max_batch_tokens(LLM, COMBINED) or facts.batch_tokens
    batch_tokens = max(budget, deployment.max_num_seqs)
    chunked = chunking.chunkable(LLM, PREFILL)
    cap = (chunking.walk_caps(LLM, COMBINED) or {}).get(PREFILL, 0)
    limits = Limits(
        slots=deployment.max_num_seqs,
        max_seq_len=window,
        pages=pages,
        page_size=deployment.page_size,
        batch_tokens=batch_tokens,
        min_chunk_tokens=chunking.min_chunk_tokens(batch_tokens),
        depth=deployment.pipeline_depth,
        max_waiting=2 * max(deployment.max_concurrent_requests, deployment.max_num_seqs) + MAX_SEQUENCES,
        chunked=chunked,
        prefix_cache=deployment.prefix_cache,
        prefill_cap=cap if chunked and cap < batch_tokens else 0,
        target_itl_ns=round((deployment.target_itl_ms or 0) * 1e6),
    )
    return Setting(limits, ranks, deployment.max_concurrent_requests)


def check_fits(setting: Setting, name: str, jobs: list[Job]) -> None:
    """Refuse a workload that the deployment would refuse. Raises ConfigError."""
    limits = setting.limits
    longest = max(jobs, key=lambda job: job.prompt_tokens + job.output_tokens)
    tokens = longest.prompt_tokens + longest.output_tokens
    if tokens > limits.max_seq_len:
        raise ConfigError(
            f"workload {name} has a request of {tokens} tokens, the deployment's window holds "
            f"{limits.max_seq_len}: choose a model with a longer one (--cost), raise --max-model-len, or "
            "choose another workload"
        )
    if limits.pages_of(tokens) > limits.pages:
        raise ConfigError(
            f"workload {name} has a request of {limits.pages_of(tokens)} KV pages, the cache has "
            f"{limits.pages}: raise --kv-cache-bytes"
        )


class _Anywhere:
    """A prompt may be cut anywhere."""

    def chunkable(self, graph_walk: str) -> bool:
        return True


def _chunking(deployment: Deployment, facts: ModelFacts) -> tuple[ChunkingManagement, int]:
    """The chunking of a causal language model of these facts, and how many ranks run it in lockstep."""
    graph = language_model(facts.batch_tokens)
    nodes = {node: NodeFacts(graph.walks_of(node)) for node in graph.nodes}
    try:
        placement = place(deployment.node_groups, nodes, tensor_parallel_size=deployment.tensor_parallel_size)
    except PlacementInvalid as error:
        raise ConfigError(str(error)) from error
    chunking = chunking_of(deployment, graph, {LLM: _Anywhere()}, placement.no_chunking)
    return chunking, placement.group_of(LLM, PREFILL).size
