"""From a deployment to a wiring."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from mstar.config.schema import Deployment, GatewayConfig, RankConfig
from mstar.daemon.compose import Address, WindowTooLong, compose
from mstar.gateway.admission import fits_empty
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


def test_the_gateway_is_stopped_before_the_rank_it_still_needs(tiny_model_dir: Path) -> None:
    rank, gateway = composed(tiny_model_dir).actors
    assert gateway.phase < rank.phase


@pytest.fixture(scope="module")
def far_sighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "far", max_position=50_000)


@pytest.mark.parametrize("window", [1, 1024, 1025, 8192, 8193, 50_000])
def test_a_prompt_that_fills_the_window_fits_a_block(far_sighted: Path, window: int) -> None:
    for slab in composed(far_sighted, max_seq_len=window).slabs:
        assert slab.classes[-1][0] >= 4 * window
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
