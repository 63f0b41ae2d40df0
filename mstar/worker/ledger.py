"""The ledger: which KV pages are free, promised or held. Plain counting, no device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ledger", "LedgerStatistics"]


class LedgerStatistics(NamedTuple):
    """Pages of one pool: free + held = total always; ``promised`` of the free ones are spoken for."""

    total: int
    free: int
    held: int
    promised: int


class Ledger:
    """Pages of one pool. A row takes pages out of what was promised to it when it was admitted.

    Admission promises a horizon: the pages a row will certainly or soon need. ``available`` is what
    a newcomer, or a row beyond its horizon, may still be promised.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self.promised = 0
        self._stack: NDArray[np.int32] = np.arange(pages, dtype=np.int32)[::-1].copy()
        self._top = pages

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return self._top

    @property
    def available(self) -> int:
        """Free pages that are promised to nobody."""
        return self._top - self.promised

    def promise(self, pages: int) -> None:
        """Set ``pages`` more aside; the caller checked ``available``."""
        self.promised += pages

    def withdraw(self, pages: int) -> None:
        """Take back a promise that was not used up."""
        self.promised -= pages

    def take(self, count: int) -> NDArray[np.int32]:
        """``count`` pages out of what was promised: int32 [count], valid until the next call.

        Raises RuntimeError if promises and pages disagree, which is a fault of ours.
        """
        top = self._top - count
        if top < 0 or count > self.promised:
            raise RuntimeError(f"{count} pages taken, {self._top} free, {self.promised} promised")
        self._top = top
        self.promised -= count
        return self._stack[top : top + count]

    def give(self, pages: NDArray[np.int32]) -> None:
        """Return ``pages``: the last step that names them has landed."""
        top = self._top + pages.size
        if top > self.total:
            raise RuntimeError(f"{pages.size} pages returned to {self._top} free of {self.total}")
        self._stack[self._top : top] = pages
        self._top = top

    def statistics(self) -> LedgerStatistics:
        """Counts at this moment."""
        return LedgerStatistics(self.total, self._top, self.total - self._top, self.promised)
