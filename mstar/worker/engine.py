"""Building a rank's engine: from a deployment and a model directory to something that runs plans."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mstar.config.schema import RankConfig
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
from mstar.validation.request import MAX_SEQUENCES
from mstar.worker.scheduler import Limits

__all__ = ["CacheTooLarge", "CacheTooSmall", "Engine", "build_engine"]

_log = logging.getLogger(__name__)

CPU_BATCH_TOKENS = 512
MIN_CHUNK_TOKENS = 64
WARM_ROWS, WARM_TOKENS = 8, 64
"""On a CPU no shape is captured: small steps touch every kernel and table that large ones use."""


class CacheTooSmall(Exception):
    """The KV cache cannot hold one sequence of the longest allowed length."""


class CacheTooLarge(Exception):
    """The machine or a limit of the process refuses the memory of the KV cache."""


class Engine(NamedTuple):
    """What a rank runs plans with."""

    limits: Limits
    executor: Executor
    runner: LanguageModelRunner


def build_engine(
    config: RankConfig,
    inputs: Callable[[Bind], NDArray[np.int32]],
    stage: Callable[[str, int, int], None],
) -> Engine:
    """Load the model and warm it up. Raises CacheTooSmall, CacheTooLarge, and what loading raises."""
    deployment = config.deployment
    directory = Path(config.model_directory)
    stage("reading the model", 0, 0)
    spec = read_spec(directory)
    device = torch.device("cpu")
    stage("choosing dtype and threads", 0, 0)
    dtype, threads, layout = _choose(spec, deployment.dtype, deployment.threads)
    torch.set_num_threads(threads)
    stage("loading weights", 0, 0)
    _log.info(
        "runs in %s on %d threads, weights %s", str(dtype).removeprefix("torch."), threads, layout.value
    )
    model = load_model(ModelFiles(config.model_name, directory), dtype=dtype, device=device, layout=layout)
    max_seq_len = min(deployment.max_seq_len or spec.max_position, spec.max_position)
    page_size = deployment.page_size
    pages = deployment.kv_cache_bytes // KVCache.nbytes_per_page(spec, page_size, dtype)
    needed = -(-max_seq_len // page_size)
    if pages < needed:
        raise CacheTooSmall(
            f"kv_cache_bytes {deployment.kv_cache_bytes} holds {pages * page_size} tokens, one sequence of"
            f" max_seq_len {max_seq_len} needs more: raise --kv-cache-bytes or lower --max-model-len"
        )
    slots = deployment.max_num_seqs
    batch_tokens = max(deployment.max_batch_tokens or CPU_BATCH_TOKENS, slots)
    limits = Limits(
        slots=slots,
        max_seq_len=max_seq_len,
        pages=pages,
        page_size=page_size,
        batch_tokens=batch_tokens,
        min_chunk_tokens=min(MIN_CHUNK_TOKENS, batch_tokens),
        depth=deployment.pipeline_depth,
        max_waiting=2 * max(deployment.max_concurrent_requests, slots) + MAX_SEQUENCES,
    )
    stage("allocating the KV cache", 0, 0)
    try:
        kv = KVCache.allocate(spec, pages, page_size, dtype, device)
    except OSError as error:
        raise CacheTooLarge(
            f"kv_cache_bytes {deployment.kv_cache_bytes} is more memory than this process may have"
            f" ({error.strerror}): lower --kv-cache-bytes, or raise the limit (ulimit -v)"
        ) from error
    table = SlotTable(slots, (needed,))
    sampler = Sampler(slots, spec.vocab_size, device)
    runner = LanguageModelRunner(model, kv, sampler, table, page_size=page_size, max_seq_len=max_seq_len)
    executor = Executor([table], [runner], CpuDevice(slots, limits.depth, runner.forward), inputs)
    stage("warming up", 0, 0)
    runner.warm_up(min(slots, WARM_ROWS), min(batch_tokens, WARM_TOKENS))
    return Engine(limits, executor, runner)


def _choose(spec: ModelSpec, dtype: str, threads: int | None) -> CpuChoice:
    """What the deployment says, and for the rest what this CPU was measured to run best with."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto" or threads is None:
        found = choose_cpu(spec)
    else:
        found = CpuChoice(named[dtype], threads, choose_layout(spec, named[dtype]))
    if dtype != "auto":
        found = found._replace(dtype=named[dtype], layout=choose_layout(spec, named[dtype]))
    return found._replace(threads=threads or found.threads)
