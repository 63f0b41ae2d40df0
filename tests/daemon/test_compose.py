"""From a deployment to a wiring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from mstar.config.schema import Deployment, GatewayConfig, NodeGroup, RankConfig
from mstar.daemon.compose import FOLLOWER, RANK, Address, CannotSplit, Meeting, WindowTooLong, compose
from mstar.gateway.admission import fits_empty
from mstar.messages.prefix import block_bytes
from mstar.model.files import ModelFiles
from mstar.validation.request import MAX_SEQUENCES
from shm.slab import SlabPool
from tests.helpers.tiny_model import write_tiny_model


def composed(directory: Path, **settings: object):  # type: ignore[no-untyped-def]
    files = ModelFiles("tiny", directory)
    return compose(
        Deployment(**settings),  # type: ignore[arg-type]
        files,
        Address(5, 6, "/run/s", 8000),
        daemon_pid=7,
        created=8,
        meeting=Meeting(b"salt", 9),
    )


def test_a_gateway_and_a_rank_are_joined_and_told_who_they_are(tiny_model_dir: Path) -> None:
    wiring = composed(tiny_model_dir, stage_timeout=9.0)
    wiring.check()
    rank, gateway = wiring.actors
    assert gateway.fds == {"tcp": 5, "uds": 6}
    assert wiring.cells() == {"cell/0": ("rank/0",), "gateway/0": ("gateway/0",)}
    assert wiring.stage_timeout == 9.0
    told = msgspec.msgpack.decode(gateway.config, type=GatewayConfig)
    assert (told.daemon_pid, told.created, told.ranks, told.tcp_port) == (7, 8, ("rank/0",), 8000)
    assert msgspec.msgpack.decode(rank.config, type=RankConfig).model_directory == str(tiny_model_dir)
    assert rank.fds == {}


@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"node_groups": (NodeGroup(tp_size=2),)}])
def test_several_ranks_are_one_cell_that_the_lowest_leads(
    tiny_model_dir: Path, settings: dict[str, Any]
) -> None:
    wiring = composed(tiny_model_dir, **settings)
    wiring.check()
    leader, follower, gateway = wiring.actors
    assert wiring.cells() == {"cell/0": ("rank/0", "rank/1"), "gateway/0": ("gateway/0",)}
    assert (leader.target, follower.target) == (RANK, FOLLOWER)
    assert gateway.phase < leader.phase < follower.phase
    (steps,) = wiring.steps
    assert (steps.leader, steps.readers) == ("rank/0", ("rank/1",))
    prompts, replays = wiring.slabs
    assert (prompts.users, replays.users) == (("rank/0", "rank/1"), ("rank/1",))
    told = [msgspec.msgpack.decode(rank.config, type=RankConfig) for rank in (leader, follower)]
    assert [(one.rank, one.world) for one in told] == [(0, 2), (1, 2)]
    assert {one.group for one in told} == {"/proc/self/fd/9"}
    assert leader.fds == follower.fds == {"rendezvous": 9}
    assert len({one.digest for one in told}) == 1


def test_ranks_and_gateway_hash_with_the_same_key(tiny_model_dir: Path) -> None:
    rank, gateway = composed(tiny_model_dir).actors
    assert msgspec.msgpack.decode(rank.config, type=RankConfig).prefix_salt == b"salt"
    assert msgspec.msgpack.decode(gateway.config, type=GatewayConfig).prefix_salt == b"salt"


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (2, "tensor_parallel_size is 2, but num_attention_heads 9 of tiny does not divide over 2 ranks; "),
        (9, "tensor_parallel_size is 9, but intermediate_size 96 of tiny does not divide over 9 ranks; "),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_do(
    tmp_path: Path, size: int, message: str
) -> None:
    nine = write_tiny_model(tmp_path / "nine", heads=9, kv_heads=3, hidden=72, ffn=96)
    with pytest.raises(CannotSplit, match=message + "allowed are 1, 3$"):
        composed(nine, tensor_parallel_size=size)
    assert len(composed(nine, tensor_parallel_size=3).actors) == 4


def test_replicas_are_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(CannotSplit, match="2 cells of 4 ranks"):
        composed(tiny_model_dir, node_groups=(NodeGroup(ranks=(0, 1, 2, 3), tp_size=2),))


def test_walks_on_other_ranks_than_the_cells_are_refused_and_not_run_elsewhere(tiny_model_dir: Path) -> None:
    groups = (
        NodeGroup(node_names=("llm",), ranks=(0, 1), tp_size=2, graph_walks=("prefill",)),
        NodeGroup(node_names=("llm",), ranks=(0,), tp_size=1, graph_walks=("decode",)),
    )
    with pytest.raises(CannotSplit, match="on all of its ranks"):
        composed(tiny_model_dir, node_groups=groups)


def test_the_gateway_is_stopped_before_the_rank_it_still_needs(tiny_model_dir: Path) -> None:
    rank, gateway = composed(tiny_model_dir).actors
    assert gateway.phase < rank.phase


@pytest.fixture(scope="module")
def far_sighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "far", max_position=50_000)


@pytest.mark.parametrize("window", [1, 1024, 1025, 8192, 8193, 50_000])
def test_a_prompt_that_fills_the_window_fits_a_block(far_sighted: Path, window: int) -> None:
    for slab in composed(far_sighted, max_seq_len=window).slabs:
        digests = window // 16 if slab.name == "prompts/0" else 0
        assert slab.classes[-1][0] >= block_bytes(window, digests)
        SlabPool.create(slab.classes).close()


def test_a_request_of_as_many_prompts_as_are_allowed_finds_its_blocks(tiny_model_dir: Path) -> None:
    prompts, _ = composed(tiny_model_dir, max_concurrent_requests=1).slabs
    assert fits_empty([4096] * MAX_SEQUENCES, prompts.classes)


def test_a_window_that_the_model_does_not_have_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(WindowTooLong, match="max_seq_len is 513; tiny allows 1 to 512"):
        composed(tiny_model_dir, max_seq_len=513)


def test_shared_memory_stays_small_enough_for_a_container(tiny_model_dir: Path) -> None:
    slabs = composed(tiny_model_dir).slabs
    assert sum(size * count for slab in slabs for size, count in slab.classes) < 32 << 20


@pytest.mark.parametrize("budget", [None, 64, "off", {"llm": {"prefill_decode": 20_000}}])
def test_a_step_can_hand_out_the_pages_of_a_whole_prompt(far_sighted: Path, budget: Any) -> None:
    (steps,) = composed(far_sighted, max_batch_tokens=budget, max_num_seqs=8).steps
    assert steps.layout[1] >= 50_000 // 16 + 2 * 8
