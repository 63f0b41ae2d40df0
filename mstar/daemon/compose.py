"""From a deployment and a model's files to the wiring: which actors run, and what joins them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from actors.wiring import ActorSpec, ChannelSpec, SlabSpec, StepSpec, Wiring
from mstar.config.digest import digest
from mstar.config.schema import MAX_RANKS, Deployment, GatewayConfig, RankConfig
from mstar.distributed.shard import Shard, UnevenShard
from mstar.messages.prefix import block_bytes
from mstar.model.files import ModelFiles
from mstar.model.spec import ModelSpec, read_spec
from mstar.validation.request import MAX_SEQUENCES
from mstar.worker.limits import TAIL_BYTES
from mstar.worker.sizing import sizing_of
from shm.steps import StepLayout

__all__ = ["FOLLOWER", "GATEWAY", "RANK", "Address", "CannotSplit", "Meeting", "WindowTooLong", "compose"]

GATEWAY = "mstar.daemon.gateway:Gateway"
RANK = "mstar.daemon.rank:Rank"
FOLLOWER = "mstar.daemon.rank:Follower"
CELL = "cell/0"

ADMIT_BYTES, ADMIT_RESERVED = 1 << 20, 1 << 16
TOKENS_BYTES = 4 << 20
# Blocks for prompts: most are short, a few are medium, and some may fill the window.
SHORT, MEDIUM = 4 << 10, 32 << 10
LONG_BLOCKS = 16
STEP_SLOTS = 8
# Pages that one step can hand out: a prefill of this many tokens, and two pages for every row.
GRANT_TOKENS = 8192

# The order of a stop: first who faces clients and drains them, then who decides, then who follows: a leader
# that has gone asks nobody for a collective any more.
_GATEWAY_PHASE, _LEADER_PHASE, _FOLLOWER_PHASE = range(3)


class WindowTooLong(Exception):
    """A window was asked for that the model does not have."""


class CannotSplit(Exception):
    """The model does not divide over so many ranks, or this version can not place it so."""


class Address(NamedTuple):
    """The listening sockets as the gateway is told of them; descriptors are the daemon's."""

    tcp_fd: int | None
    uds_fd: int
    uds_path: str
    tcp_port: int | None


class Meeting(NamedTuple):
    """What the daemon draws once per start: the key of page digests, and the file where ranks meet.

    ``rendezvous_fd`` is the daemon's descriptor of a file without a name, inherited by the ranks.
    """

    prefix_salt: bytes = b""
    rendezvous_fd: int | None = None


def compose(
    deployment: Deployment,
    files: ModelFiles,
    address: Address,
    *,
    daemon_pid: int,
    created: int,
    meeting: Meeting = Meeting(),  # noqa: B008 - an immutable value
) -> Wiring:
    """The wiring of one gateway and one cell of ranks. ``created`` is the Unix time that clients are told.

    Raises WindowTooLong, CannotSplit, PlacementInvalid, ConfigError for budgets that the model does not have,
    and UnsupportedModel or BadModelFiles from reading the model's config.
    """
    spec = read_spec(files.directory)
    window = _window(deployment, files, spec)
    world = _world(deployment, files, spec)
    ranks, gateway = tuple(f"rank/{index}" for index in range(world)), "gateway/0"
    leader, followers = ranks[0], ranks[1:]
    gateway_config = GatewayConfig(
        deployment=deployment,
        model_name=files.name,
        model_directory=str(files.directory),
        ranks=(leader,),
        daemon_pid=daemon_pid,
        uds_path=address.uds_path,
        tcp_port=address.tcp_port,
        created=created,
        prefix_salt=meeting.prefix_salt,
    )
    sockets = {"uds": address.uds_fd}
    if address.tcp_fd is not None:
        sockets["tcp"] = address.tcp_fd
    seqs = deployment.max_num_seqs
    requests = deployment.max_concurrent_requests
    hashed = deployment.page_size if deployment.prefix_cache else None
    return Wiring(
        actors=(
            *_ranks(deployment, files, ranks, meeting),
            # Last: a stop reaches the gateway first, which drains while the ranks still serve.
            ActorSpec(
                name=gateway,
                cell=gateway,
                target=GATEWAY,
                config=msgspec.msgpack.encode(gateway_config),
                fds=sockets,
                stop_phase=_GATEWAY_PHASE,
            ),
        ),
        channels=(
            ChannelSpec("admit/0", gateway, leader, ADMIT_BYTES, ADMIT_RESERVED),
            ChannelSpec("tokens/0", leader, gateway, TOKENS_BYTES),
        ),
        slabs=(
            SlabSpec(
                "prompts/0",
                gateway,
                ranks,
                _blocks(window, hashed, 2 * requests + MAX_SEQUENCES, requests // 4),
            ),
            SlabSpec("replays/0", leader, followers, _blocks(window, None, seqs, seqs)),
        ),
        steps=(StepSpec("steps/0", leader, followers, _layout(deployment, window, len(followers))),),
        stage_timeout=deployment.stage_timeout,
    )


def _ranks(
    deployment: Deployment, files: ModelFiles, names: tuple[str, ...], meeting: Meeting
) -> list[ActorSpec]:
    """The ranks of the cell; the first one leads it."""
    world = len(names)
    directory = str(files.directory)
    fd = meeting.rendezvous_fd
    fds = {"rendezvous": fd} if world > 1 and fd is not None else {}
    shared = RankConfig(
        rank=0,
        deployment=deployment,
        model_name=files.name,
        model_directory=directory,
        world=world,
        prefix_salt=meeting.prefix_salt,
        digest=digest(deployment, directory, world),
        group=f"/proc/self/fd/{fd}" if fds else "",
    )
    return [
        ActorSpec(
            name=name,
            cell=CELL,
            target=FOLLOWER if index else RANK,
            config=msgspec.msgpack.encode(msgspec.structs.replace(shared, rank=index)),
            fds=fds,
            stop_phase=_FOLLOWER_PHASE if index else _LEADER_PHASE,
        )
        for index, name in enumerate(names)
    ]


def _window(deployment: Deployment, files: ModelFiles, spec: ModelSpec) -> int:
    longest = spec.max_position
    asked = deployment.max_seq_len
    if asked is not None and asked > longest:
        raise WindowTooLong(
            f"max_seq_len is {asked}; {files.name} allows 1 to {longest}: "
            "lower --max-model-len, or leave it out"
        )
    return asked or longest


def _world(deployment: Deployment, files: ModelFiles, spec: ModelSpec) -> int:
    """Ranks of the cell that runs the model. Raises CannotSplit, PlacementInvalid and ConfigError."""
    placement = sizing_of(deployment).placement  # what does not fit the model's graph is told now
    world = len(placement.ranks)
    if any(len(group.instances) > 1 or group.ranks != placement.ranks for group in placement.groups):
        groups = "; ".join(f"{', '.join(group.nodes)} on {list(group.ranks)}" for group in placement.groups)
        raise CannotSplit(
            f"the node groups make {len(placement.cells)} cells of {world} ranks ({groups}); this version "
            "runs all walks of a model in one cell, on all of its ranks in ascending order: give one group "
            "as many ranks as its tp_size"
        )
    fault = _fault(spec, world)
    if fault is not None:
        fits = [str(size) for size in range(1, MAX_RANKS + 1) if _fault(spec, size) is None]
        raise CannotSplit(
            f"tensor_parallel_size is {world}, but {fault} of {files.name} does not divide over {world} "
            f"ranks; allowed are {', '.join(fits)}"
        )
    return world


def _fault(spec: ModelSpec, world: int) -> str | None:
    """The dimension of the model, with its size, that does not divide over ``world`` ranks."""
    shard = Shard(0, world)
    dimensions = (
        ("num_attention_heads", spec.heads, shard.span),
        ("num_key_value_heads", spec.kv_heads, shard.replicated_span),
        ("intermediate_size", spec.ffn_size, shard.span),
    )
    for what, size, span in dimensions:
        try:
            span(size, what)
        except UnevenShard:
            return f"{what} {size}"
    return None


def _blocks(window: int, hashed: int | None, short: int, medium: int) -> tuple[tuple[int, int], ...]:
    """Block classes (bytes, count) for int32 tokens of at most ``window``.

    With digests behind them, one for each full page of ``hashed`` tokens.
    """
    most = block_bytes(window, window // hashed if hashed else 0)
    longest = -(-most // SHORT) * SHORT
    classes = [(SHORT, max(short, LONG_BLOCKS))]
    if longest > MEDIUM:
        classes.append((MEDIUM, max(medium, LONG_BLOCKS)))
    if longest > SHORT:
        classes.append((longest, LONG_BLOCKS if longest > MEDIUM else max(medium, LONG_BLOCKS)))
    return tuple(classes)


def _layout(deployment: Deployment, window: int, readers: int) -> tuple[int, ...]:
    """Room for what one step can hand out: at least a whole prompt, and a decode's page for every row."""
    seqs = deployment.max_num_seqs
    tokens = max(_most_budget(deployment), GRANT_TOKENS, window)
    return tuple(
        StepLayout(
            max_rows=seqs,
            max_grants=-(-tokens // deployment.page_size) + 2 * seqs,
            tail_bytes=TAIL_BYTES,
            slots=STEP_SLOTS,
            readers=readers,
        )
    )


def _most_budget(deployment: Deployment) -> int:
    """The largest number of tokens that the deployment allows a step."""
    budgets = deployment.max_batch_tokens
    if isinstance(budgets, Mapping):
        each = [walks.values() if isinstance(walks, Mapping) else (walks,) for walks in budgets.values()]
        return max((tokens or 0 for walks in each for tokens in walks), default=0)
    return budgets if isinstance(budgets, int) else 0
