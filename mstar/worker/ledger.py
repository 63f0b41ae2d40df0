"""The ledger: which KV pages are free, cached or held, and what is promised. Plain counting, no device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.worker.prefix import PrefixIndex

__all__ = ["Ledger", "LedgerStatistics", "Match"]

Pages = NDArray[np.int32]

_RESERVE = 64
"""One page in so many is evicted ahead of need, at most so many at once: looking for one costs more."""


class Match(NamedTuple):
    """Leading pages of a prompt that are in the index, and how many of them nobody holds now.

    The idle ones count in ``available`` until they are leased.
    """

    pages: int
    idle: int


class LedgerStatistics(NamedTuple):
    """Pages of one pool: free + cached + held = total always; ``promised`` of free + cached are spoken for.

    ``filed`` pages are in the prefix index, held ones included. Counts since the start: ``hits`` pages
    leased out of the index, ``evicted`` cached pages that were given away.
    """

    total: int
    free: int
    cached: int
    held: int
    promised: int
    filed: int
    hits: int
    evicted: int


class Ledger:
    """Pages of one pool. A row takes pages out of what was promised to it when it was admitted.

    A page is free, held by one row or more, or cached: nobody holds it, and a prompt that begins like the
    one it was computed for may lease it. Cached pages go, least recently used first, when no free one is
    left. ``keep`` False: a page that nobody holds is free at once.

    Admission promises a horizon: the pages a row will certainly or soon need. ``available`` is what a
    newcomer, or a row beyond its horizon, may still be promised. A lease is not taken out of a promise,
    but every idle page leased is one fewer available. So a row that needs ``horizon`` pages in all and
    matches ``match`` is admitted if ``horizon - match.pages + match.idle <= available``, leases at once,
    and promises ``horizon - match.pages``.
    """

    def __init__(self, pages: int, *, keep: bool = True) -> None:
        self.total = pages
        self.promised = 0
        self.keep = keep
        self._stack: Pages = np.arange(pages, dtype=np.int32)[::-1].copy()
        self._top = pages
        self._held = 0
        self._index = PrefixIndex(pages)
        # 0: not in the index, held once if it is held; else 1 + how many hold it.
        self._holds: Pages = np.zeros(pages, np.int32)
        self._hits = self._evicted = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds and that hold nothing worth keeping."""
        return self._top

    @property
    def cached(self) -> int:
        """Pages in the index that nobody holds."""
        return self._index.resting

    @property
    def held(self) -> int:
        """Pages that somebody holds, shared ones counted once."""
        return self._held

    @property
    def available(self) -> int:
        """Free and cached pages that are promised to nobody."""
        return self._top + self._index.resting - self.promised

    @property
    def moment(self) -> tuple[int, int]:
        """Differs from an earlier one if a newcomer that found no room then might find it now."""
        return self.available, self._index.changes

    def promise(self, pages: int) -> None:
        """Set ``pages`` more aside; the caller checked ``available``."""
        self.promised += pages

    def withdraw(self, pages: int) -> None:
        """Take back a promise that was not used up."""
        self.promised -= pages

    def take(self, count: int) -> Pages:
        """``count`` pages out of what was promised: int32 [count], valid until the next call.

        Free pages first, then cached ones. Raises RuntimeError if promises and pages disagree, which is
        a fault of ours.
        """
        top = self._top - count
        if count > self.promised or top + self._index.resting < 0:
            counts = f"{self._top} free, {self._index.resting} cached, {self.promised} promised"
            raise RuntimeError(f"{count} pages taken, {counts}")
        if top < 0:
            self._evict(-top)
            top = self._top - count
        self._top = top
        self.promised -= count
        self._held += count
        return self._stack[top : top + count]

    def give(self, pages: Pages) -> None:
        """``pages`` (distinct, in the order of a row) have one holder fewer: its last step has landed.

        Later pages of the row are evicted before earlier ones, without which they could not be found.
        """
        if len(self._index):
            holds = self._holds[pages]
            if np.count_nonzero(holds):
                pages = self._give_filed(pages, holds)
        top = self._top + pages.size
        if pages.size > self._held:
            raise RuntimeError(f"{pages.size} pages returned, {self._held} of {self.total} are held")
        self._stack[self._top : top] = pages
        self._top = top
        self._held -= pages.size

    def match(self, digests: bytes, limit: int) -> Match:
        """What of a prompt with these ``digests`` is there; ``limit`` is the most pages it may lease."""
        pages = self._index.find(digests, limit)
        return Match(pages.size, pages.size - int(np.count_nonzero(self._holds[pages] > 1)))

    def lease(self, digests: bytes, pages: int) -> Pages:
        """One holder more for each of the first ``pages`` pages that ``match`` found: int32 [pages].

        Not out of a promise. Raises RuntimeError if so many are not there, or if that would take away
        what others were promised.
        """
        found = self._index.find(digests, pages)
        if found.size < pages:
            raise RuntimeError(f"{pages} pages leased, {found.size} match")
        holds = self._holds[found]
        idle = found[holds == 1]
        if idle.size > self.available:
            raise RuntimeError(f"{idle.size} idle pages leased, {self.available} available")
        self._holds[found] = holds + 1
        if idle.size:
            self._index.wake(idle)
            self._held += idle.size
        self._hits += pages
        return found

    def file(self, pages: Pages, digests: bytes) -> None:
        """The full ``pages`` (int32 [n]), which a row holds, have landed: others may lease them.

        ``digests`` name them, 16 bytes each. A digest that another page has stays with it. Raises
        RuntimeError if a page has another digest.
        """
        new = self._index.add(pages.tolist(), digests)
        if new:
            self._holds[new] = 2

    def check(self) -> None:
        """Raises RuntimeError unless every page is either free, cached or held, once. For idle moments."""
        counts = self.statistics()
        free, cached = self._stack[: self._top], self._index.rests()
        apart = np.unique(np.concatenate((free, cached))).size
        filed = int(np.count_nonzero(self._holds))
        if (
            counts.free + counts.cached + counts.held != counts.total
            or apart != free.size + counts.cached
            or not 0 <= counts.promised <= counts.free + counts.cached
            or filed != counts.filed
            or np.any(self._holds[free] != 0)
            or np.any(self._holds[cached] != 1)
        ):
            raise RuntimeError(f"the ledger does not add up: {counts}, {apart} pages apart, {filed} marked")

    def statistics(self) -> LedgerStatistics:
        """Counts at this moment."""
        return LedgerStatistics(
            total=self.total,
            free=self._top,
            cached=self._index.resting,
            held=self._held,
            promised=self.promised,
            filed=len(self._index),
            hits=self._hits,
            evicted=self._evicted,
        )

    def _give_filed(self, pages: Pages, holds: Pages) -> Pages:
        """One holder fewer for those of ``pages`` that are in the index; the others, now to be free."""
        filed = holds > 0
        listed = pages[filed]
        left = holds[filed] - 1
        if np.count_nonzero(left < 1):
            raise RuntimeError(f"pages {listed[left < 1].tolist()} returned, nobody holds them")
        self._holds[listed] = left
        idle = listed[left == 1]
        others: Pages = pages[~filed]
        if not idle.size:
            return others
        if not self.keep:
            self._index.forget(idle)
            self._holds[idle] = 0
            return np.concatenate((others, idle))
        self._index.rest(idle[::-1])
        self._held -= idle.size
        return others

    def _evict(self, count: int) -> None:
        """Put ``count`` cached pages, or some more, below the free ones."""
        count = max(count, min(self._index.resting, self.total // _RESERVE, _RESERVE))
        pages = self._index.evict(count)
        self._holds[pages] = 0
        self._evicted += count
        self._stack[count : count + self._top] = self._stack[: self._top].copy()
        self._stack[:count] = pages
        self._top += count
