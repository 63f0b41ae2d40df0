"""Sums and gathers over gloo, and the meeting of ranks before them."""

from __future__ import annotations

import os

import psutil
import pytest
import torch
from torch import Tensor

from mstar.distributed.gloo import CollectiveFailed, GlooGroup
from mstar.distributed.layers import VocabEmbedding
from mstar.distributed.rendezvous import PeerMissing, Rendezvous
from mstar.distributed.shard import Shard
from tests.distributed.groups import grouped, meeting


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("rows", [1, 16, 2000])
def test_every_rank_gets_the_same_bits_of_the_sum(world: int, rows: int) -> None:
    parts = [torch.randn(rows, 96, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]

    def summed(group: GlooGroup) -> Tensor:
        with torch.inference_mode():
            return group.all_reduce(parts[group.shard.rank].clone())

    sums = grouped(world, summed)
    assert all(torch.equal(found, sums[0]) for found in sums)
    torch.testing.assert_close(sums[0], torch.stack(parts).sum(0), atol=1e-5, rtol=0)


def test_half_precision_is_added_in_float32() -> None:
    def summed(group: GlooGroup) -> float:
        x = torch.tensor([[256.0, 1.0, 1.0][group.shard.rank]], dtype=torch.bfloat16)
        return float(group.all_reduce(x))

    assert grouped(3, summed) == [258.0] * 3  # one after the other in bfloat16 they would be 256


def test_a_gather_stands_in_rank_order() -> None:
    def gathered(group: GlooGroup) -> list[list[float]]:
        return group.all_gather(torch.full((2, 3), float(group.shard.rank))).tolist()

    assert grouped(3, gathered) == [[[0.0] * 3 + [1.0] * 3 + [2.0] * 3] * 2] * 3


def test_rows_that_nobody_wants_need_no_collective() -> None:
    def empty(group: GlooGroup) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        found = group.all_gather(torch.empty(0, 4)), group.all_reduce(torch.empty(0, 4))
        return tuple(found[0].shape), tuple(found[1].shape), group.statistics().gathers

    assert grouped(2, empty) == [((0, 8), (0, 4), 0)] * 2


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_vocabulary_that_does_not_divide_is_whole_after_the_gather(world: int) -> None:
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

    for found in grouped(world, logits):
        torch.testing.assert_close(found, x @ weight.T)


def test_every_rank_hears_what_each_says_and_what_the_first_settles() -> None:
    def talk(rendezvous: Rendezvous) -> tuple[list[str], str]:
        rank = rendezvous.shard.rank
        return rendezvous.share("name", str(rank)), rendezvous.settle("choice", str(rank))

    assert meeting(3, talk) == [(["0", "1", "2"], "0")] * 3


def test_a_later_round_in_the_same_file_meets_no_words_of_an_earlier_one() -> None:
    fd = os.memfd_create("rendezvous")
    path = f"/proc/self/fd/{fd}"
    Rendezvous(path, Shard(0, 2), round=1).settle("choice", "old")
    late = Rendezvous(path, Shard(1, 2), round=2, timeout=0.05)
    with pytest.raises(PeerMissing, match=r"rank 0 says nothing on 'choice' within 0\.05 s"):
        late.settle("choice", None)
    Rendezvous(path, Shard(0, 2), round=2).settle("choice", "new")
    assert late.settle("choice", None) == "new"
    os.close(fd)


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
