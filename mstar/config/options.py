"""The one table of settings a person can give: path in the deployment, flags, environment variable, meaning.

Types, defaults and ranges live in mstar.config.schema; flags, environment, `mstar config` and
docs/configuration.md are all derived from the two.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["OPTIONS", "OTHER_VARIABLES", "Option", "option"]


class Option(NamedTuple):
    """One setting. ``path`` is dotted; ``size`` takes units (1GiB); ``many`` repeats (or commas).

    ``negated`` has one flag that says no, ``switch`` one that says yes and one that says no. Without
    flags and variable it stands in files only.
    """

    path: str
    flags: tuple[str, ...]
    variable: str
    help: str
    size: bool = False
    many: bool = False
    negated: bool = False
    switch: bool = False
    metavar: str = "N"


OPTIONS: tuple[Option, ...] = (
    Option(
        "model",
        ("--model",),
        "MSTAR_MODEL",
        "a registry name, a local directory in Hugging Face layout, a GGUF file, or a hub id",
        metavar="MODEL",
    ),
    Option(
        "served_model_name",
        ("--served-model-name",),
        "MSTAR_SERVED_MODEL_NAME",
        "names under which clients ask for the model; the first one is answered with",
        many=True,
        metavar="NAME",
    ),
    Option(
        "dtype",
        ("--dtype",),
        "MSTAR_DTYPE",
        "type of weights and arithmetic; auto chooses by measurement on a CPU",
        metavar="DTYPE",
    ),
    Option(
        "max_seq_len",
        ("--max-model-len",),
        "MSTAR_MAX_MODEL_LEN",
        "window in tokens, prompt and answer together; lower it to save memory; by default the model's own",
    ),
    Option(
        "max_num_seqs",
        ("--max-num-seqs",),
        "MSTAR_MAX_NUM_SEQS",
        "sequences that run at once (slots); others wait their turn",
    ),
    Option(
        "max_batch_tokens",
        ("--max-num-batched-tokens",),
        "MSTAR_MAX_NUM_BATCHED_TOKENS",
        "tokens of one step, prefill and decode together, at least max_num_seqs; lower it for smoother "
        "streams beside long prompts, off to run every prompt in one step; a file may give a number or null "
        "(off) for a node, or for a walk of a node",
        metavar="N|off",
    ),
    Option(
        "min_chunk_tokens",
        ("--min-chunk-tokens",),
        "MSTAR_MIN_CHUNK_TOKENS",
        "fewest tokens that a prompt is cut to in a step that has little room left; by default 64; raise it "
        "where many short chunks slow long prompts down",
    ),
    Option(
        "target_itl_ms",
        ("--target-itl-ms",),
        "MSTAR_TARGET_ITL_MS",
        "longest gap between two tokens of a stream that prompts beside it may cause; each step then takes "
        "as many prompt tokens as fit, at most max_batch_tokens",
        metavar="MS",
    ),
    Option(
        "prefix_cache",
        ("--enable-prefix-caching", "--no-enable-prefix-caching"),
        "MSTAR_ENABLE_PREFIX_CACHING",
        "keep the pages of prompts that ended, so that a prompt with the same beginning skips it",
        switch=True,
    ),
    Option(
        "max_concurrent_requests",
        ("--max-concurrent-requests",),
        "MSTAR_MAX_CONCURRENT_REQUESTS",
        "requests accepted at once, running and waiting; beyond it clients get 429 at once",
    ),
    Option(
        "max_body_bytes",
        ("--max-body-bytes",),
        "MSTAR_MAX_BODY_BYTES",
        "largest request body; raise it for very long prompts",
        size=True,
        metavar="SIZE",
    ),
    Option(
        "tensor_parallel_size",
        ("--tensor-parallel-size", "--tp"),
        "MSTAR_TENSOR_PARALLEL_SIZE",
        "ranks over which each layer is split",
    ),
    Option(
        "node_groups",
        (),
        "",
        "which nodes of the model run on which ranks, for deployments that place them by hand; each group "
        "has node_names (by default the nodes of no other group), ranks (by default the next free ones), "
        "tp_size and sp_size (ranks in lockstep, by default tensor_parallel_size and 1), and graph_walks (by "
        "default all); without it one group holds every node",
    ),
    Option(
        "pipeline_depth",
        ("--pipeline-depth",),
        "MSTAR_PIPELINE_DEPTH",
        "steps planned ahead of the tokens; 0 waits for each step, for debugging",
    ),
    Option(
        "page_size",
        ("--block-size",),
        "MSTAR_BLOCK_SIZE",
        "tokens in one page of the KV cache",
    ),
    Option(
        "kv_cache_bytes",
        ("--kv-cache-bytes",),
        "MSTAR_KV_CACHE_BYTES",
        "memory of the KV cache, of all ranks together; raise it for more or longer sequences at once",
        size=True,
        metavar="SIZE",
    ),
    Option(
        "threads",
        ("--threads",),
        "MSTAR_THREADS",
        "CPU threads of the forward; by default chosen by measurement",
    ),
    Option(
        "drain_seconds",
        ("--drain-seconds",),
        "MSTAR_DRAIN_SECONDS",
        "how long open streams may finish after SIGTERM before they end with an error event",
        metavar="SECONDS",
    ),
    Option(
        "stage_timeout",
        ("--stage-timeout",),
        "MSTAR_STAGE_TIMEOUT",
        "longest time without progress in one stage of the start",
        metavar="SECONDS",
    ),
    Option(
        "log_level",
        ("--log-level",),
        "MSTAR_LOG_LEVEL",
        "least severe log line that is written",
        metavar="LEVEL",
    ),
    Option(
        "log_format",
        ("--log-format",),
        "MSTAR_LOG_FORMAT",
        "text for people, json for log collectors; one line an event in both",
        metavar="FORMAT",
    ),
    Option(
        "listen.host",
        ("--host",),
        "MSTAR_HOST",
        "address of the TCP socket; 0.0.0.0 serves other machines (then set an API key)",
        metavar="HOST",
    ),
    Option(
        "listen.port",
        ("--port",),
        "MSTAR_PORT",
        "port of the TCP socket; 0 takes a free one",
        metavar="PORT",
    ),
    Option(
        "listen.uds",
        ("--uds",),
        "MSTAR_UDS",
        "path of the Unix socket; by default $XDG_RUNTIME_DIR/mstar/mstar.sock",
        metavar="PATH",
    ),
    Option(
        "listen.tcp",
        ("--no-tcp",),
        "MSTAR_NO_TCP",
        "do not listen on TCP, only on the Unix socket",
        negated=True,
    ),
    Option(
        "listen.api_keys",
        ("--api-key",),
        "MSTAR_API_KEY",
        "key that HTTP clients must send as a bearer token; may be given several times",
        many=True,
        metavar="KEY",
    ),
)

OTHER_VARIABLES: tuple[tuple[str, str], ...] = (
    ("MSTAR_CACHE", "folder of pulled and converted models; by default $XDG_CACHE_HOME/mstar"),
    ("HF_HUB_OFFLINE", "1 keeps hub ids from being looked up over the network"),
    (
        "XDG_RUNTIME_DIR",
        "where the default Unix socket lies; without it in a 0700 folder of the temp directory",
    ),
    ("XDG_STATE_HOME", "where the log of a background daemon lies; by default ~/.local/state"),
)

_by_path = {entry.path: entry for entry in OPTIONS}


def option(path: str) -> Option:
    """The setting of ``path``; raises KeyError for a path no setting has."""
    return _by_path[path]
