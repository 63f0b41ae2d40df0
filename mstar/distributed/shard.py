"""Which part of a dimension a rank holds; plain arithmetic, no torch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["WHOLE", "Shard", "UnevenShard"]


class UnevenShard(Exception):
    """A dimension does not divide over the ranks."""


class Shard(NamedTuple):
    """Rank `rank` of `world` ranks that share each layer."""

    rank: int = 0
    world: int = 1

    def span(self, size: int, what: str) -> range:
        """The rank's even part of `size` units; UnevenShard names `what` where they do not divide."""
        if size % self.world:
            raise UnevenShard(
                f"{what} {size} does not divide over {self.world} ranks; "
                f"use a divisor of {size} as the number of ranks."
            )
        length = size // self.world
        return range(self.rank * length, (self.rank + 1) * length)

    def replicated_span(self, size: int, what: str) -> range:
        """As `span`, but with more ranks than units each unit is held by world / size ranks (key/value
        heads)."""
        if size >= self.world:
            return self.span(size, what)
        if self.world % size:
            raise UnevenShard(
                f"{what} {size} does not divide {self.world} ranks; "
                f"use a multiple or a divisor of {size} ranks."
            )
        start = self.rank * size // self.world
        return range(start, start + 1)

    def padded_span(self, size: int) -> range:
        """The rank's part of `size` units cut into equal pieces, the last ones reaching past the end
        (padding)."""
        length = -(-size // self.world)
        return range(self.rank * length, (self.rank + 1) * length)


WHOLE = Shard(0, 1)
