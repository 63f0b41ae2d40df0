"""A group of ranks on one host that add and gather through shared memory, in one round."""

from __future__ import annotations

import logging
import mmap
import os
import time
from typing import NamedTuple

import torch
from torch import Tensor

from mstar.distributed.errors import CollectiveFailed
from mstar.distributed.group import Group
from mstar.distributed.rendezvous import Rendezvous

__all__ = ["OneShotGroup", "OneShotStatistics"]

_log = logging.getLogger(__name__)

_PAGE = 4096
_LINE = 16  # u64 words from one rank's call number to the next: two cache lines
_YIELDS = 200
_NAP = 50e-6
_LOOK_NS = 50_000_000
_LATE_NS = 5_000_000_000
_AREA = 4 << 20


class OneShotStatistics(NamedTuple):
    """Collectives since the start, those too large for the shared memory, and naps while a peer was late."""

    collectives: int
    large: int
    naps: int


class OneShotGroup:
    """The Group of ranks that met at ``rendezvous``; what does not fit the shared memory goes to ``large``.

    Every rank puts its part into its own area, says so, waits until all have, and reads the others' parts:
    one round of memory copies, where a message between processes would take several hand-overs between
    threads. Every rank adds in rank order: the sums are the same bits everywhere. There are two areas a
    rank, used in turn: who begins a call has seen that everybody began the last one, and so had read what
    lies in the area of the call before that.

    The memory has no name: rank 0 makes it, the others open it through its process. Waiting yields the
    core, then sleeps in steps of 50 us. Raises PeerMissing; a collective raises CollectiveFailed when a
    peer is gone, or does not come within the bound of the rendezvous.
    """

    def __init__(self, rendezvous: Rendezvous, large: Group, *, name: str = "tp", area: int = _AREA) -> None:
        self.shard = rendezvous.shard
        rank, world = self.shard
        self._large = large
        self._area = area
        self._patience_ns = round(rendezvous.timeout * 1e9)
        self._pids = [int(pid) for pid in rendezvous.share(f"{name} process", str(os.getpid()))]
        head = (8 * _LINE * world + _PAGE - 1) & -_PAGE
        size = head + world * 2 * area
        fd = os.memfd_create("mstar collectives") if rank == 0 else -1
        if rank == 0:
            os.posix_fallocate(fd, 0, size)
        path = rendezvous.settle(f"{name} memory", f"/proc/{os.getpid()}/fd/{fd}" if rank == 0 else None)
        if rank:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory = mmap.mmap(fd, size)
        rendezvous.share(f"{name} open", "yes")  # only then may rank 0 close what the others open
        os.close(fd)
        self._words = memoryview(self._memory)[:head].cast("Q")
        areas = torch.frombuffer(self._memory, dtype=torch.uint8, offset=head)
        self._areas = areas.view(world, 2, area).transpose(0, 1)
        self._peers = [peer for peer in range(world) if peer != rank]
        self._own = rank * _LINE
        self._calls = self._larges = self._naps = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, same shape and dtype; `x` itself where it is contiguous.

        Half precision is added in float32.
        """
        if not x.numel():
            return x
        x = x.contiguous()
        if x.nbytes > self._area:
            self._larges += 1
            return self._large.all_reduce(x)
        parts = self._exchange(x)
        if x.dtype == torch.float32:
            torch.sum(parts, 0, out=x.view(-1))
            return x
        return x.copy_(parts.sum(0, dtype=torch.float32).view(x.shape))

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` [.., n] side by side in rank order: [.., world * n]; n is the same everywhere."""
        if not x.numel():
            return x.new_empty((*x.shape[:-1], x.shape[-1] * self.shard.world))
        if x.nbytes > self._area:
            self._larges += 1
            return self._large.all_gather(x)
        parts = self._exchange(x.contiguous()).view(self.shard.world, *x.shape)
        return torch.cat(tuple(parts), -1)

    def statistics(self) -> OneShotStatistics:
        """Counts since the start."""
        return OneShotStatistics(self._calls, self._larges, self._naps)

    def _exchange(self, x: Tensor) -> Tensor:
        """Every rank's `x`, [world, n], valid until the call after the next."""
        call = self._calls = self._calls + 1
        parts = self._areas[call & 1, :, : x.nbytes].view(x.dtype)
        parts[self.shard.rank].copy_(x.view(-1))
        words = self._words
        words[self._own] = call  # x86 keeps the order of stores: who reads this word reads the part too
        for peer in self._peers:
            if words[peer * _LINE] < call:
                self._await(peer, call)
        return parts

    def _await(self, peer: int, call: int) -> None:
        words, at = self._words, peer * _LINE
        for _ in range(_YIELDS):
            os.sched_yield()
            if words[at] >= call:
                return
        began = looked = time.monotonic_ns()
        told = False
        while words[at] < call:
            time.sleep(_NAP)
            self._naps += 1
            now = time.monotonic_ns()
            if now - looked < _LOOK_NS:
                continue
            looked = now
            if now - began > _LATE_NS and not told:
                told = True
                late = (self.shard.rank, peer, words[at], call)
                _log.warning("rank %d waits for rank %d, which has come to collective %d of %d", *late)
            if not _lives(self._pids[peer]) and words[at] < call:
                self._fail(peer, call, "has ended")
            if now - began > self._patience_ns:
                self._fail(peer, call, f"did not come within {self._patience_ns / 1e9:g} s")

    def _fail(self, peer: int, call: int, why: str) -> None:
        raise CollectiveFailed(f"collective {call} of rank {self.shard.rank} failed: rank {peer} {why}")


def _lives(pid: int) -> bool:
    """Whether the process still runs code; one that is being torn down or waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state = stat.read().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X", b"x")
