"""Sums and gathers over gloo and over shared memory, and the meeting of ranks before them."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from mstar.distributed import oneshot
from mstar.distributed.errors import CollectiveFailed, PeerMissing
from mstar.distributed.gloo import GlooGroup
from mstar.distributed.group import ALONE
from mstar.distributed.layers import VocabEmbedding
from mstar.distributed.oneshot import OneShotGroup
from mstar.distributed.rendezvous import Rendezvous
from mstar.distributed.shard import Shard
from tests.distributed.groups import PATH, ROUNDS, grouped, meeting
from tests.helpers.waiting import wait_until

KINDS = pytest.mark.parametrize("kind", ["gloo", "one-shot"])


@KINDS
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("rows", [1, 16, 2000])
def test_every_rank_gets_the_same_bits_of_the_sum(world: int, rows: int, kind: str) -> None:
    parts = [torch.randn(rows, 96, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]

    def summed(group: GlooGroup) -> Tensor:
        with torch.inference_mode():
            return group.all_reduce(parts[group.shard.rank].clone())

    sums = grouped(world, summed, kind=kind)
    assert all(torch.equal(found, sums[0]) for found in sums)
    torch.testing.assert_close(sums[0], torch.stack(parts).sum(0), atol=1e-5, rtol=0)


@KINDS
def test_half_precision_is_added_in_float32(kind: str) -> None:
    def summed(group: GlooGroup) -> float:
        x = torch.tensor([[256.0, 1.0, 1.0][group.shard.rank]], dtype=torch.bfloat16)
        return float(group.all_reduce(x))

    assert grouped(3, summed, kind=kind) == [258.0] * 3  # one after the other in bfloat16 they would be 256


@KINDS
def test_a_gather_stands_in_rank_order(kind: str) -> None:
    def gathered(group: GlooGroup) -> list[list[float]]:
        return group.all_gather(torch.full((2, 3), float(group.shard.rank))).tolist()

    assert grouped(3, gathered, kind=kind) == [[[0.0] * 3 + [1.0] * 3 + [2.0] * 3] * 2] * 3


@KINDS
def test_rows_that_nobody_wants_need_no_collective(kind: str) -> None:
    def empty(group: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        found = group.all_gather(torch.empty(0, 4)), group.all_reduce(torch.empty(0, 4))
        return tuple(found[0].shape), tuple(found[1].shape), sum(group.statistics())

    assert grouped(2, empty, kind=kind) == [((0, 8), (0, 4), 0)] * 2


@KINDS
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_vocabulary_that_does_not_divide_is_whole_after_the_gather(world: int, kind: str) -> None:
    vocab, hidden = 10, 4
    weight = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(1))

    class Whole:
        name, shape = "embedding", (vocab, hidden)

        def read(self, *slices: slice) -> Tensor:
            return weight[slices]

    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(2))

    def logits(group: GlooGroup) -> Tensor:
        layer = VocabEmbedding(vocab, hidden, group.shard)
        layer.load("", "weight", Whole())
        return group.all_gather(layer.project(x))[:, :vocab]

    for found in grouped(world, logits, kind=kind):
        torch.testing.assert_close(found, x @ weight.T)


def test_every_rank_hears_what_each_says_and_what_the_first_settles() -> None:
    def talk(rendezvous: Rendezvous) -> tuple[list[str], str]:
        rank = rendezvous.shard.rank
        return rendezvous.share("name", str(rank)), rendezvous.settle("choice", str(rank))

    assert meeting(3, talk) == [(["0", "1", "2"], "0")] * 3


def test_a_later_round_in_the_same_file_meets_no_words_of_an_earlier_one() -> None:
    old, new = next(ROUNDS), next(ROUNDS)
    Rendezvous(PATH, Shard(0, 2), round=old).settle("choice", "old")
    late = Rendezvous(PATH, Shard(1, 2), round=new, timeout=0.05)
    with pytest.raises(PeerMissing, match=r"rank 0 says nothing on 'choice' within 0\.05 s"):
        late.settle("choice", None)
    Rendezvous(PATH, Shard(0, 2), round=new).settle("choice", "new")
    assert late.settle("choice", None) == "new"


def test_a_rank_that_does_not_come_is_named_within_the_bound() -> None:
    def alone(rendezvous: Rendezvous) -> None:
        if rendezvous.shard.rank == 0:
            with pytest.raises(PeerMissing, match=r"rank 1 says nothing on 'digest' within 0\.1 s"):
                rendezvous.share("digest", "x")

    meeting(2, alone, timeout=0.1)


def test_a_peer_that_goes_away_fails_the_collective_instead_of_hanging_it() -> None:
    def leave(group: GlooGroup) -> bool:
        group.all_reduce(torch.ones(4))
        if group.shard.rank == 1:
            return True
        with pytest.raises(CollectiveFailed, match="collective 2 of rank 0 failed"):
            group.all_reduce(torch.ones(4))
        return True

    assert grouped(2, leave) == [True, True]


def test_a_group_listens_on_loopback_only() -> None:
    def listening(group: GlooGroup) -> set[str]:
        group.all_reduce(torch.ones(1))
        return {connection.laddr.ip for connection in psutil.Process().net_connections("inet")}

    assert set.union(*grouped(2, listening)) <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_what_is_too_large_for_the_shared_memory_goes_to_the_group_below() -> None:
    def both(group: OneShotGroup) -> tuple[float, float, int, int]:
        sums = [float(group.all_reduce(torch.ones(count)).sum()) for count in (1024, 1025)]
        return *sums, *group.statistics()[:2]  # type: ignore[return-value]

    assert grouped(2, both, kind="one-shot", area=4096) == [(2048.0, 2050.0, 1, 1)] * 2


def test_a_rank_that_is_late_by_many_calls_still_adds_the_right_parts() -> None:
    def staggered(group: OneShotGroup) -> list[float]:
        sums = []
        for call in range(60):
            if call % 7 == group.shard.rank:
                for _ in range(500):
                    os.sched_yield()
            sums.append(float(group.all_reduce(torch.full((3,), float(call * 10 + group.shard.rank)))[2]))
        return sums

    assert grouped(3, staggered, kind="one-shot") == [[3.0 * 10 * call + 3 for call in range(60)]] * 3


def test_a_peer_that_does_not_come_fails_the_sum_within_the_bound() -> None:
    def alone(rendezvous: Rendezvous) -> None:
        group = OneShotGroup(rendezvous, ALONE)
        if rendezvous.shard.rank == 0:
            with pytest.raises(CollectiveFailed, match=r"collective 1 of rank 0 .* rank 1 did not come"):
                group.all_reduce(torch.ones(4))

    meeting(2, alone, timeout=1.0)


def test_a_peer_whose_process_ended_fails_the_sum_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oneshot, "_lives", lambda pid: False)

    def alone(rendezvous: Rendezvous) -> None:
        group = OneShotGroup(rendezvous, ALONE)
        if rendezvous.shard.rank == 0:
            with pytest.raises(CollectiveFailed, match="rank 1 has ended"):
                group.all_reduce(torch.ones(4))

    meeting(2, alone, timeout=60.0)


def test_a_process_lives_until_it_has_ended() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert oneshot._lives(child.pid)
    child.kill()
    wait_until(lambda: not oneshot._lives(child.pid), what="the zombie to count as dead")
    child.wait()
    assert not oneshot._lives(child.pid)
