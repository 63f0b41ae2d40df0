"""Which part of a dimension a rank holds."""

from __future__ import annotations

import pytest

from mstar.distributed.shard import Shard, UnevenShard


def parts(world: int) -> list[Shard]:
    return [Shard(rank, world) for rank in range(world)]


def test_even_parts_cover_the_dimension() -> None:
    assert [shard.span(12, "x") for shard in parts(3)] == [range(4), range(4, 8), range(8, 12)]


def test_fewer_heads_than_ranks_are_held_by_neighbours() -> None:
    assert [shard.replicated_span(2, "heads").start for shard in parts(4)] == [0, 0, 1, 1]
    assert [shard.replicated_span(4, "heads") for shard in parts(2)] == [range(2), range(2, 4)]


def test_padded_parts_are_equal_and_reach_past_the_end() -> None:
    assert [shard.padded_span(10) for shard in parts(4)] == [range(3), range(3, 6), range(6, 9), range(9, 12)]


def test_what_does_not_divide_is_named() -> None:
    with pytest.raises(UnevenShard, match="intermediate_size 10 does not divide over 4 ranks"):
        Shard(0, 4).span(10, "intermediate_size")
    with pytest.raises(UnevenShard, match="heads 3 does not divide 4 ranks"):
        Shard(0, 4).replicated_span(3, "heads")
