"""Ranks of a group as threads of this process, each with a rendezvous and a gloo group of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mstar.distributed.gloo import GlooGroup
from mstar.distributed.oneshot import OneShotGroup
from mstar.distributed.rendezvous import Rendezvous
from mstar.distributed.shard import Shard

T = TypeVar("T")


def meeting(world: int, work: Callable[[Rendezvous], T], *, round: int = 1, timeout: float = 10.0) -> list[T]:
    """What ``work`` returns for each rank; the first error is raised."""
    fd = os.memfd_create("rendezvous")
    try:
        with ThreadPoolExecutor(world) as pool:

            def run(rank: int) -> T:
                path = f"/proc/self/fd/{fd}"
                return work(Rendezvous(path, Shard(rank, world), round=round, timeout=timeout))

            return list(pool.map(run, range(world)))
    finally:
        os.close(fd)


def grouped(world: int, work: Callable[[Any], T], *, kind: str = "gloo", **options: Any) -> list[T]:
    """What ``work`` returns for each rank of a group: "gloo", or "one-shot" over one."""

    def run(rendezvous: Rendezvous) -> T:
        gloo = GlooGroup(rendezvous)
        return work(gloo if kind == "gloo" else OneShotGroup(rendezvous, gloo, **options))

    return meeting(world, run)
