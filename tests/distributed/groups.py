"""Ranks of a group as threads of this process, each with a rendezvous and a gloo group of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mstar.distributed.gloo import GlooGroup
from mstar.distributed.oneshot import OneShotGroup
from mstar.distributed.rendezvous import Rendezvous
from mstar.distributed.shard import Shard

T = TypeVar("T")


# Open as long as this process: a store looks at its file once more when it is collected, whenever that is.
PATH = f"/proc/self/fd/{os.memfd_create('rendezvous')}"
ROUNDS = itertools.count(1)


def meeting(world: int, work: Callable[[Rendezvous], T], *, timeout: float = 10.0) -> list[T]:
    """What ``work`` returns for each rank; the first error is raised."""
    round = next(ROUNDS)
    with ThreadPoolExecutor(world) as pool:
        shards = [Shard(rank, world) for rank in range(world)]
        return list(
            pool.map(lambda shard: work(Rendezvous(PATH, shard, round=round, timeout=timeout)), shards)
        )


def grouped(world: int, work: Callable[[Any], T], *, kind: str = "gloo", **options: Any) -> list[T]:
    """What ``work`` returns for each rank of a group: "gloo", or "one-shot" over one."""

    def run(rendezvous: Rendezvous) -> T:
        gloo = GlooGroup(rendezvous)
        return work(gloo if kind == "gloo" else OneShotGroup(rendezvous, gloo, **options))

    return meeting(world, run)
