"""The deployment as frozen structs: every key, its default and its allowed range live here once."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "MAX_BATCH_TOKENS",
    "MAX_RANKS",
    "Budgets",
    "Deployment",
    "GatewayConfig",
    "Listen",
    "NodeGroup",
    "RankConfig",
]

MAX_BATCH_TOKENS = 1 << 20
MAX_RANKS = 64

Positive = Annotated[int, Meta(ge=1)]
Tokens = Annotated[int, Meta(ge=1, le=MAX_BATCH_TOKENS)]
Shards = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
# One number for all, "off" (nothing is chunked), or node -> number, null (off), or walk -> number or null.
Budgets = Tokens | Literal["off"] | dict[str, Tokens | dict[str, Tokens | None] | None]
Port = Annotated[int, Meta(ge=0, le=65535)]


class Listen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the server listens. ``uds`` None means the default path; ``tcp`` False leaves only the socket."""

    host: str = "127.0.0.1"
    port: Port = 8000
    uds: str | None = None
    tcp: bool = True
    api_keys: tuple[str, ...] = ()


class NodeGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes that live on the same ranks, tp_size * sp_size of them in lockstep.

    Empty ``node_names`` are all nodes that no other group names, empty ``ranks`` the next free ones,
    and empty ``graph_walks`` all walks that run one of the nodes; ``tp_size`` None is the deployment's
    tensor_parallel_size.
    """

    node_names: tuple[str, ...] = ()
    ranks: tuple[Annotated[int, Meta(ge=0, le=MAX_RANKS - 1)], ...] = ()
    tp_size: Shards | None = None
    sp_size: Shards = 1
    graph_walks: tuple[str, ...] = ()


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One deployment. Flags take vLLM's names where it has one (see mstar.config.load)."""

    model: str = "smollm2-135m-instruct"
    served_model_name: tuple[str, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_seq_len: Positive | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=1024)] = 64
    max_batch_tokens: Budgets | None = None
    min_chunk_tokens: Tokens | None = None
    target_itl_ms: Annotated[float, Meta(gt=0, le=60_000)] | None = None
    prefix_cache: bool = True
    max_concurrent_requests: Annotated[int, Meta(ge=1, le=1 << 16)] = 256
    max_body_bytes: Positive = 8 << 20
    tensor_parallel_size: Shards = 1
    node_groups: tuple[NodeGroup, ...] = ()
    pipeline_depth: Annotated[int, Meta(ge=0, le=2)] = 1
    page_size: Annotated[int, Meta(ge=1, le=256)] = 16
    kv_cache_bytes: Annotated[int, Meta(ge=1, le=1 << 50)] = 1 << 30
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    drain_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    stage_timeout: Annotated[float, Meta(gt=0, le=86_400)] = 300.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    listen: Listen = msgspec.field(default_factory=Listen)


class GatewayConfig(msgspec.Struct, frozen=True):
    """What the daemon hands a gateway actor (msgpack).

    ``prefix_salt`` is the key of the hashes of prompt pages, drawn once per start of the daemon.
    """

    deployment: Deployment
    model_name: str
    model_directory: str
    ranks: tuple[str, ...]
    daemon_pid: int
    uds_path: str | None
    tcp_port: int | None
    created: int
    prefix_salt: bytes = b""


class RankConfig(msgspec.Struct, frozen=True):
    """What the daemon hands a rank actor (msgpack).

    ``world`` ranks of the cell run in lockstep and meet at ``group``, the path of a rendezvous file (empty
    where the rank is alone). ``digest`` is that of mstar.config.digest, equal on every rank of a cell.
    """

    rank: int
    deployment: Deployment
    model_name: str
    model_directory: str
    world: int = 1
    prefix_salt: bytes = b""
    digest: str = ""
    group: str = ""
