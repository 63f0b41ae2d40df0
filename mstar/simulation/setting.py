"""What a deployment means to the simulator: limits and ranks, as the engine would set them for this cost."""

from __future__ import annotations

from typing import NamedTuple

from mstar.config.load import ConfigError, Resolved
from mstar.model.graphs import LLM, PREFILL
from mstar.simulation.cost import ModelFacts
from mstar.simulation.workloads import Job
from mstar.validation.placement import PlacementInvalid
from mstar.worker.limits import Limits
from mstar.worker.sizing import limits_of, sizing_of

__all__ = ["Setting", "check_fits", "setting_of"]


MOST_RANKS = 16
"""Every rank of a simulated cell keeps its own books: more take memory that a prediction is not worth."""


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
    try:
        sizing = sizing_of(deployment, batch_tokens=facts.batch_tokens)
    except PlacementInvalid as error:
        raise ConfigError(str(error)) from error
    ranks = sizing.placement.group_of(LLM, PREFILL).size
    if ranks > MOST_RANKS:
        raise ConfigError(f"{ranks} ranks are to be simulated; allowed are 1 to {MOST_RANKS}: lower --tp")
    cache_bytes = deployment.kv_cache_bytes  # of all ranks together
    if facts.cache_bytes and resolved.sources.get("kv_cache_bytes", "default") == "default":
        cache_bytes = facts.cache_bytes * ranks
    window = min(deployment.max_seq_len or facts.window, facts.window)
    pages = cache_bytes // (facts.kv_token_bytes * deployment.page_size)
    if pages * deployment.page_size < window:
        raise ConfigError(
            f"kv_cache_bytes {cache_bytes} holds {pages * deployment.page_size} tokens of {facts.name}, one "
            f"sequence of max_seq_len {window} needs more: raise --kv-cache-bytes or lower --max-model-len"
        )
    limits = limits_of(
        deployment, sizing.chunking, window=window, pages=pages, batch_tokens=facts.batch_tokens
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
