"""What a layer asks of the other ranks of its group."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mstar.distributed.shard import WHOLE, Shard

__all__ = ["ALONE", "Alone", "Group"]


class Group(Protocol):
    """The ranks that share a layer. Every rank makes the same calls in the same order."""

    @property
    def shard(self) -> Shard: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, same shape; may reuse `x`."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` [.., n] side by side in rank order: [.., world * n]; n is the same everywhere."""
        ...


class Alone:
    """A group of one rank: nothing to exchange."""

    shard = WHOLE

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


ALONE = Alone()
