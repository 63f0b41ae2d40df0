"""Building a rank's engine: from a deployment and a model directory to something that runs plans."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mstar.config.digest import digest
from mstar.config.schema import Deployment, RankConfig
from mstar.distributed.gloo import GlooGroup
from mstar.distributed.oneshot import OneShotGroup
from mstar.distributed.rendezvous import Rendezvous
from mstar.distributed.shard import WHOLE, Shard
from mstar.engine.chunking import ChunkingManagement
from mstar.engine.device import CpuDevice
from mstar.engine.executor import Executor
from mstar.engine.runner import LanguageModelRunner
from mstar.engine.sampler import Sampler
from mstar.engine.slot_table import SlotTable
from mstar.messages.step import Bind
from mstar.model.api import KVCache
from mstar.model.choose import CpuChoice, choose_cpu, choose_layout
from mstar.model.files import ModelFiles
from mstar.model.spec import ModelSpec, read_spec
from mstar.model.weights import load_model
from mstar.worker.agreement import check_alike, model_identity, settle_choice
from mstar.worker.limits import Limits
from mstar.worker.sizing import limits_of, sizing_of

__all__ = ["CacheTooLarge", "CacheTooSmall", "Engine", "build_engine"]

_log = logging.getLogger(__name__)

WARM_ROWS, WARM_TOKENS = 8, 64
"""On a CPU no shape is captured: small steps touch every kernel and table that large ones use."""

_WAIT_SHARE = 0.8
"""Of the time that a stage may stand still, what a rank waits for its peers: it knows best who is missing."""


class CacheTooSmall(Exception):
    """The KV cache cannot hold one sequence of the longest allowed length."""


class CacheTooLarge(Exception):
    """The machine or a limit of the process refuses the memory of the KV cache."""


class Engine(NamedTuple):
    """What a rank runs plans with; ``group`` joins it with the other ranks of its cell, if there are any."""

    limits: Limits
    executor: Executor
    runner: LanguageModelRunner
    group: OneShotGroup | None


def build_engine(
    config: RankConfig,
    inputs: Callable[[Bind], NDArray[np.int32]],
    stage: Callable[[str, int, int], None],
    *,
    generation: int = 1,
) -> Engine:
    """Load this rank's part of the model and warm it up, in step with the other ranks of its cell.

    ``generation`` counts the starts of the cell. Raises CacheTooSmall, CacheTooLarge, ConfigMismatch,
    PeerMissing, CollectiveFailed, and what loading raises.
    """
    deployment = config.deployment
    directory = Path(config.model_directory)
    shard = Shard(config.rank, config.world) if config.world > 1 else WHOLE
    stage("reading the model", 0, 0)
    spec = read_spec(directory)
    rendezvous = None
    if config.world > 1:
        stage("meeting the other ranks", 0, 0)
        patience = _WAIT_SHARE * deployment.stage_timeout
        rendezvous = Rendezvous(config.group, shard, round=generation, timeout=patience)
    stage("choosing dtype and threads", 0, 0)
    dtype, threads, layout = _choose(spec, deployment, shard, rendezvous)
    torch.set_num_threads(threads)
    chunking = sizing_of(deployment).chunking
    limits = _limits(deployment, spec, dtype, shard, chunking)
    group = None
    if rendezvous is not None:
        facts = {
            "configuration": digest(deployment, config.model_directory, config.world),
            "configuration that it was handed": config.digest,
            "model": model_identity(directory),
            "limits": str(limits),
            "program": str(chunking.statistics()),
        }
        stage("comparing with the other ranks", 0, 0)
        check_alike(rendezvous, facts)
        group = OneShotGroup(rendezvous, GlooGroup(rendezvous))
    stage("loading weights", 0, 0)
    _log.info(
        "runs in %s on %d threads, weights %s", str(dtype).removeprefix("torch."), threads, layout.value
    )
    device = torch.device("cpu")
    files = ModelFiles(config.model_name, directory)
    model = load_model(files, dtype=dtype, device=device, shard=shard, group=group, layout=layout)
    page_size, slots = limits.page_size, limits.slots
    stage("allocating the KV cache", 0, 0)
    try:
        kv = KVCache.allocate(spec, limits.pages, page_size, dtype, device, shard=shard)
    except OSError as error:
        raise CacheTooLarge(
            f"kv_cache_bytes {deployment.kv_cache_bytes} is more memory than this process may have"
            f" ({error.strerror}): lower --kv-cache-bytes, or raise the limit (ulimit -v)"
        ) from error
    table = SlotTable(slots, (limits.pages_of(limits.max_seq_len),))
    runner = LanguageModelRunner(
        model,
        kv,
        Sampler(slots, spec.vocab_size, device),
        table,
        page_size=page_size,
        max_seq_len=limits.max_seq_len,
        chunking=chunking,
    )
    cpu = CpuDevice(slots, limits.depth, runner.forward, lockstep=config.world > 1)
    executor = Executor([table], [runner], cpu, inputs)
    stage("warming up", 0, 0)
    runner.warm_up(min(slots, WARM_ROWS), min(limits.batch_tokens, WARM_TOKENS))
    return Engine(limits, executor, runner, group)


def _limits(
    deployment: Deployment, spec: ModelSpec, dtype: torch.dtype, shard: Shard, chunking: ChunkingManagement
) -> Limits:
    """What bounds the node, from facts that are the same on every rank. Raises CacheTooSmall."""
    window = min(deployment.max_seq_len or spec.max_position, spec.max_position)
    page_size = deployment.page_size
    page_bytes = shard.world * KVCache.nbytes_per_page(spec, page_size, dtype, shard=shard)
    pages = deployment.kv_cache_bytes // page_bytes
    if pages < -(-window // page_size):
        raise CacheTooSmall(
            f"kv_cache_bytes {deployment.kv_cache_bytes} holds {pages * page_size} tokens, one sequence of"
            f" max_seq_len {window} needs more: raise --kv-cache-bytes or lower --max-model-len"
        )
    return limits_of(deployment, chunking, window=window, pages=pages)


def _choose(
    spec: ModelSpec, deployment: Deployment, shard: Shard, rendezvous: Rendezvous | None
) -> CpuChoice:
    """What the deployment says, and for the rest what this CPU was measured to run best with.

    Ranks of one cell share the cores, and all take what rank 0 chooses.
    """
    if rendezvous is None:
        return _chosen(spec, deployment.dtype, deployment.threads)
    choice = None
    if shard.rank == 0:
        cores = len(os.sched_getaffinity(0))
        choice = _chosen(spec, deployment.dtype, deployment.threads or max(1, cores // shard.world))
    return settle_choice(rendezvous, choice)


def _chosen(spec: ModelSpec, dtype: str, threads: int | None) -> CpuChoice:
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto" or threads is None:
        found = choose_cpu(spec)
    else:
        found = CpuChoice(named[dtype], threads, choose_layout(spec, named[dtype]))
    if dtype != "auto":
        found = found._replace(dtype=named[dtype], layout=choose_layout(spec, named[dtype]))
    return found._replace(threads=threads or found.threads)
