"""TokenStop: which rows of a step ended by a stop id, from token ids alone. Text is the gateway's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["TokenStop"]

_WIDTH = 1 << 16
_MASK: NDArray[np.int32] = np.array(_WIDTH - 1, np.int32)
_NONE: list[int] = []


class TokenStop:
    """The stop ids of the rows in their slots.

    A step is looked up in one table of the low bits of every row's stop ids, whatever their number;
    only tokens found there are compared with the ids of their own row.
    """

    def __init__(self) -> None:
        self._maybe: NDArray[np.bool_] = np.zeros(_WIDTH, np.bool_)
        self._counts: dict[int, int] = {}
        self._ids: dict[int, frozenset[int]] = {}

    def bind(self, slot: int, ids: Sequence[int]) -> None:
        """The row in ``slot`` ends with any of ``ids``."""
        if not ids:
            return
        self._ids[slot] = chosen = frozenset(ids)
        counts = self._counts
        for token in chosen:
            low = token & (_WIDTH - 1)
            counts[low] = counts.get(low, 0) + 1
            self._maybe[low] = True

    def release(self, slot: int) -> None:
        """The row in ``slot`` is gone."""
        counts = self._counts
        for token in self._ids.pop(slot, ()):
            low = token & (_WIDTH - 1)
            counts[low] -= 1
            if not counts[low]:
                del counts[low]
                self._maybe[low] = False

    def hits(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> list[int]:
        """The places in ``rows`` (slots, int64 [n]) whose token of ``tokens`` (int32 [n]) ends them."""
        if not self._ids:
            return _NONE
        maybe = self._maybe.take(tokens & _MASK)
        if not np.count_nonzero(maybe):
            return _NONE
        places = maybe.nonzero()[0]
        found = zip(places.tolist(), rows[places].tolist(), tokens[places].tolist(), strict=True)
        return [place for place, slot, token in found if token in self._ids.get(slot, ())]
