"""From a deployment and a model's files to the wiring: which actors run, and what joins them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from actors.wiring import ActorSpec, ChannelSpec, SlabSpec, StepSpec, Wiring
from mstar.config.schema import Deployment, GatewayConfig, RankConfig
from mstar.model.files import ModelFiles
from mstar.model.spec import read_spec
from mstar.validation.request import MAX_SEQUENCES
from mstar.worker.limits import TAIL_BYTES
from shm.steps import StepLayout

__all__ = ["GATEWAY", "RANK", "Address", "WindowTooLong", "compose"]

GATEWAY = "mstar.daemon.gateway:Gateway"
RANK = "mstar.daemon.rank:Rank"

ADMIT_BYTES, ADMIT_RESERVED = 1 << 20, 1 << 16
TOKENS_BYTES = 4 << 20
# Blocks for prompts: most are short, a few are medium, and some may fill the window.
SHORT, MEDIUM = 4 << 10, 32 << 10
LONG_BLOCKS = 16
STEP_SLOTS = 8
# Pages that one step can hand out: a prefill of this many tokens, and two pages for every row.
GRANT_TOKENS = 8192


class WindowTooLong(Exception):
    """A window was asked for that the model does not have."""


class Address(NamedTuple):
    """The listening sockets as the gateway is told of them; descriptors are the daemon's."""

    tcp_fd: int | None
    uds_fd: int
    uds_path: str
    tcp_port: int | None


def compose(
    deployment: Deployment, files: ModelFiles, address: Address, *, daemon_pid: int, created: int
) -> Wiring:
    """The wiring of one gateway and one rank. ``created`` is the Unix time that clients are told.

    Raises WindowTooLong, and UnsupportedModel or BadModelFiles from reading the model's config.
    """
    window = _window(deployment, files)
    rank, gateway = "rank/0", "gateway/0"
    gateway_config = GatewayConfig(
        deployment=deployment,
        model_name=files.name,
        model_directory=str(files.directory),
        ranks=(rank,),
        daemon_pid=daemon_pid,
        uds_path=address.uds_path,
        tcp_port=address.tcp_port,
        created=created,
    )
    rank_config = RankConfig(
        rank=0,
        deployment=deployment,
        model_name=files.name,
        model_directory=str(files.directory),
    )
    sockets = {"uds": address.uds_fd}
    if address.tcp_fd is not None:
        sockets["tcp"] = address.tcp_fd
    seqs = deployment.max_num_seqs
    requests = deployment.max_concurrent_requests
    return Wiring(
        actors=(
            ActorSpec(name=rank, cell="cell/0", target=RANK, config=msgspec.msgpack.encode(rank_config)),
            # Last: a stop reaches the gateway first, which drains while the rank still serves.
            ActorSpec(
                name=gateway,
                cell=gateway,
                target=GATEWAY,
                config=msgspec.msgpack.encode(gateway_config),
                fds=sockets,
            ),
        ),
        channels=(
            ChannelSpec("admit/0", gateway, rank, ADMIT_BYTES, ADMIT_RESERVED),
            ChannelSpec("tokens/0", rank, gateway, TOKENS_BYTES),
        ),
        slabs=(
            SlabSpec(
                "prompts/0", gateway, (rank,), _blocks(window, 2 * requests + MAX_SEQUENCES, requests // 4)
            ),
            SlabSpec("replays/0", rank, (), _blocks(window, seqs, seqs)),
        ),
        steps=(StepSpec("steps/0", rank, (), _layout(deployment)),),
        stage_timeout=deployment.stage_timeout,
    )


def _window(deployment: Deployment, files: ModelFiles) -> int:
    longest = read_spec(files.directory).max_position
    asked = deployment.max_seq_len
    if asked is not None and asked > longest:
        raise WindowTooLong(
            f"max_seq_len is {asked}; {files.name} allows 1 to {longest}: "
            "lower --max-model-len, or leave it out"
        )
    return asked or longest


def _blocks(window: int, short: int, medium: int) -> tuple[tuple[int, int], ...]:
    """Block classes (bytes, count) for int32 tokens of at most ``window``."""
    longest = -(-4 * window // SHORT) * SHORT
    classes = [(SHORT, max(short, LONG_BLOCKS))]
    if longest > MEDIUM:
        classes.append((MEDIUM, max(medium, LONG_BLOCKS)))
    if longest > SHORT:
        classes.append((longest, LONG_BLOCKS if longest > MEDIUM else max(medium, LONG_BLOCKS)))
    return tuple(classes)


def _layout(deployment: Deployment) -> tuple[int, ...]:
    seqs = deployment.max_num_seqs
    tokens = max(deployment.max_batch_tokens or 0, GRANT_TOKENS)
    return tuple(
        StepLayout(
            max_rows=seqs,
            max_grants=-(-tokens // deployment.page_size) + 2 * seqs,
            tail_bytes=TAIL_BYTES,
            slots=STEP_SLOTS,
            readers=0,
        )
    )
