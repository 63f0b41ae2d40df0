"""The deployment as frozen structs: every key, its default and its allowed range live here once."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["Deployment", "GatewayConfig", "Listen", "RankConfig"]

Positive = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class Listen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the server listens. ``uds`` None means the default path; ``tcp`` False leaves only the socket."""

    host: str = "127.0.0.1"
    port: Port = 8000
    uds: str | None = None
    tcp: bool = True
    api_keys: tuple[str, ...] = ()


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One deployment. Flags take vLLM's names where it has one (see mstar.config.load)."""

    model: str = "smollm2-135m-instruct"
    served_model_name: tuple[str, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_seq_len: Positive | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=1024)] = 64
    max_batch_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    max_concurrent_requests: Annotated[int, Meta(ge=1, le=1 << 16)] = 256
    max_body_bytes: Positive = 8 << 20
    tensor_parallel_size: Positive = 1
    pipeline_depth: Annotated[int, Meta(ge=0, le=2)] = 1
    page_size: Annotated[int, Meta(ge=1, le=256)] = 16
    kv_cache_bytes: Positive = 1 << 30
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    drain_seconds: Annotated[float, Meta(ge=0)] = 30.0
    stage_timeout: Annotated[float, Meta(gt=0)] = 300.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    listen: Listen = msgspec.field(default_factory=Listen)


class GatewayConfig(msgspec.Struct, frozen=True):
    """What the daemon hands a gateway actor (msgpack)."""

    deployment: Deployment
    model_name: str
    model_directory: str
    ranks: tuple[str, ...]
    daemon_pid: int
    uds_path: str | None
    tcp_port: int | None
    created: int


class RankConfig(msgspec.Struct, frozen=True):
    """What the daemon hands a rank actor (msgpack)."""

    rank: int
    deployment: Deployment
    model_name: str
    model_directory: str
