"""A group of ranks on one host, joined by gloo over the loopback interface."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mstar.distributed.errors import CollectiveFailed
from mstar.distributed.rendezvous import Rendezvous

__all__ = ["GlooGroup", "GlooStatistics"]

_Gloo: Any = dist.ProcessGroupGloo  # its methods are not in the library's type stubs
_LOOPBACK = "127.0.0.1"
_ONE_ROUND_BYTES = 1 << 20


class GlooStatistics(NamedTuple):
    """Collectives and the bytes this rank put into them, since the start."""

    reductions: int
    gathers: int
    nbytes: int


class GlooGroup:
    """The Group of ranks that met at `rendezvous`; every rank makes the same calls in the same order.

    Small tensors are summed from a gather in one round, which took half the time of gloo's two rounds,
    large ones by a ring. Either way every rank adds in the same order: the sums are the same bits
    everywhere. No port is fixed, and none is open but on loopback. Raises
    PeerMissing; a collective raises CollectiveFailed.
    """

    def __init__(self, rendezvous: Rendezvous, *, name: str = "tp") -> None:
        self.shard = rendezvous.shard
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=rendezvous.timeout)
        options._devices = [_Gloo.create_device(hostname=_LOOPBACK)]
        options._threads = 1  # calls come one after another: a second thread would only take turns
        with rendezvous.bounded("not every rank of the group connects"):
            self._gloo = _Gloo(rendezvous.store(name), self.shard.rank, self.shard.world, options)
        self._sum = dist.AllreduceOptions()
        self._reductions = self._gathers = self._nbytes = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, same shape and dtype; `x` itself where it is contiguous.

        Half precision is added in float32.
        """
        if not x.numel():
            return x
        x = x.contiguous()
        self._reductions += 1
        self._nbytes += x.nbytes
        if x.nbytes * self.shard.world > _ONE_ROUND_BYTES and x.dtype == torch.float32:
            self._wait(self._gloo.allreduce([x], self._sum))
            return x
        parts = self._gathered(x)
        if x.dtype == torch.float32:
            return torch.sum(parts, 0, out=x)
        return x.copy_(parts.sum(0, dtype=torch.float32))

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` [.., n] side by side in rank order: [.., world * n]; n is the same everywhere."""
        if not x.numel():
            return x.new_empty((*x.shape[:-1], x.shape[-1] * self.shard.world))
        self._gathers += 1
        self._nbytes += x.nbytes
        return self._gathered(x.contiguous()).movedim(0, -2).flatten(-2)

    def statistics(self) -> GlooStatistics:
        """Counts since the start."""
        return GlooStatistics(self._reductions, self._gathers, self._nbytes)

    def _gathered(self, x: Tensor) -> Tensor:
        """Every rank's `x`: [world, *x.shape]."""
        flat = x.new_empty(self.shard.world * x.numel())
        self._wait(self._gloo._allgather_base(flat, x.view(-1)))
        return flat.view(self.shard.world, *x.shape)

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CollectiveFailed(
                f"collective {self._reductions + self._gathers} of rank {self.shard.rank} failed: {reason}"
            ) from error
