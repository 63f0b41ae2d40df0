"""TokenStop: which rows of a step ended by a stop id, from token ids alone. Text is the gateway's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["TokenStop"]

_WIDTH = 1 << 16
_MASK: NDArray[np.int32] = np.array(_WIDTH - 1, np.int32)
_NONE: list[int] = []


class TokenStop:
    """The stop ids of the rows in their slots.

    A step is looked up in one table of the low bits of every row's stop ids, whatever their number;
    only tokens found there are compared with the ids of their own row. Rows mostly share their ids
    (those that end a turn), so sets of ids are counted, not rows.
    """

    def __init__(self) -> None:
        self._maybe: NDArray[np.bool_] = np.zeros(_WIDTH, np.bool_)
        self._low: dict[int, int] = {}
        self._rows: dict[tuple[int, ...], int] = {}
        self._ids: dict[int, tuple[int, ...]] = {}

    def bind(self, slot: int, ids: tuple[int, ...]) -> None:
        """The row in ``slot`` ends with any of ``ids``."""
        if not ids:
            return
        self._ids[slot] = ids
        rows = self._rows.get(ids, 0)
        self._rows[ids] = rows + 1
        if not rows:
            for token in ids:
                low = token & (_WIDTH - 1)
                self._low[low] = self._low.get(low, 0) + 1
                self._maybe[low] = True

    def release(self, slot: int) -> None:
        """The row in ``slot`` is gone."""
        ids = self._ids.pop(slot, None)
        if ids is None:
            return
        self._rows[ids] -= 1
        if not self._rows[ids]:
            del self._rows[ids]
            for token in ids:
                low = token & (_WIDTH - 1)
                self._low[low] -= 1
                if not self._low[low]:
                    del self._low[low]
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
