"""Sums over the ranks of a cell on one host, through gloo and through shared memory, with the rate of each.

A layer has two of them, so a step of 30 layers waits for 61: on a CPU they decide whether ranks pay.

    python -m tools.bench.collectives [--ranks 2,3] [--rows 1,16,512] [--hidden 576] [--calls 200]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from mstar.distributed.gloo import GlooGroup
from mstar.distributed.group import Group
from mstar.distributed.oneshot import OneShotGroup
from mstar.distributed.rendezvous import Rendezvous
from mstar.distributed.shard import Shard

__all__ = ["Figure", "main", "measure"]

_REPEATS = 3


class Figure(NamedTuple):
    """One sum of ``rows`` x hidden float32: wall and CPU microseconds of rank 0, the best of three runs."""

    kind: str
    ranks: int
    rows: int
    wall_us: float
    cpu_us: float


def measure(ranks: int, rows: list[int], hidden: int, calls: int) -> list[Figure]:
    """Figures of a cell of ``ranks`` processes."""
    context = multiprocessing.get_context("fork")
    meeting = os.memfd_create("rendezvous")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=_rank, args=(Shard(rank, ranks), meeting, rows, hidden, calls, theirs))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    os.close(meeting)
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"a rank failed: exit codes {[process.exitcode for process in processes]}")
    found: list[Figure] = ours.recv()
    return found


def _rank(shard: Shard, meeting: int, rows: list[int], hidden: int, calls: int, end: Connection) -> None:
    torch.set_num_threads(1)
    rendezvous = Rendezvous(f"/proc/self/fd/{meeting}", shard, timeout=60.0)
    gloo = GlooGroup(rendezvous)
    groups: dict[str, Group] = {"gloo": gloo, "shared memory": OneShotGroup(rendezvous, gloo)}
    with torch.inference_mode():
        found = [
            Figure(kind, shard.world, count, *_best(group, torch.ones(count, hidden), calls))
            for count in rows
            for kind, group in groups.items()
        ]
    if shard.rank == 0:
        end.send(found)


def _best(group: Group, x: torch.Tensor, calls: int) -> tuple[float, float]:
    """Wall and CPU microseconds of a call."""
    took = []
    for _ in range(_REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            group.all_reduce(x)
            x.mul_(1 / group.shard.world)
        took.append(((time.perf_counter() - wall) * 1e6 / calls, (time.process_time() - cpu) * 1e6 / calls))
    return min(took)


def main(argv: list[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.collectives", description=__doc__)
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--rows", default="1,16,512")
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--calls", type=int, default=200)
    given = parser.parse_args(argv)
    rows = [int(count) for count in given.rows.split(",")]
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print("ranks  rows  through          wall us   cpu us   GB/s read")
    for ranks in (int(count) for count in given.ranks.split(",")):
        for figure in measure(ranks, rows, given.hidden, given.calls):
            read = 4 * figure.rows * given.hidden * ranks / figure.wall_us / 1e3
            print(
                f"{ranks:5}  {figure.rows:4}  {figure.kind:15}  {figure.wall_us:7.0f}  {figure.cpu_us:7.0f}"
                f"  {read:10.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
