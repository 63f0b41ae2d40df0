"""The prefix index: which page holds what a digest names, and in which order pages nobody holds go."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.messages.prefix import DIGEST_BYTES

__all__ = ["PrefixIndex"]

Pages = NDArray[np.int32]

_NO_PAGES: Pages = np.empty(0, np.int32)
_AWAKE = -1


class _Found(NamedTuple):
    """What the last search found: leading pages of ``digests``, right until something is removed."""

    digests: bytes
    removals: int
    pages: Pages


class PrefixIndex:
    """Digests of one pool of ``pages`` pages. A page has at most one digest, a digest at most one page.

    Pages that somebody holds are awake. The others rest: they lie in a log in the order in which they
    came to rest, and are evicted from its start. A page that wakes leaves its entry behind; the entry
    counts only while it is the page's latest, so that resting, waking and evicting touch no other page.
    A page that is forgotten keeps its digest too, marked as no longer ``listed``, until it has a new one: so
    eviction is a few array operations, and the dictionary never has more entries than there are pages.
    """

    def __init__(self, pages: int) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: list[bytes | None] = [None] * pages
        self._listed = bytearray(pages)
        self._listed_column: NDArray[np.uint8] = np.frombuffer(self._listed, np.uint8)
        self._count = 0
        self._log: Pages = np.empty(2 * pages, np.int32)
        self._start = self._end = 0
        self._entry: NDArray[np.int64] = np.full(pages, _AWAKE, np.int64)
        self._removals = 0
        self.changes = 0
        """How often something was added or removed."""
        self._found = _Found(b"", 0, _NO_PAGES)
        self.resting = 0
        """Pages in the index that nobody holds."""

    def __len__(self) -> int:
        return self._count

    def find(self, digests: bytes, limit: int) -> Pages:
        """The pages of the leading digests, int32 [n], n <= ``limit``, up to the first that has none.

        Who asks again, having waited for pages, is not searched for from the start again.
        """
        asked, removals, known = self._found
        if removals != self._removals or asked != digests:
            known = _NO_PAGES
        page_of, is_listed = self._page_of, self._listed
        more = []
        for at in range(known.size * DIGEST_BYTES, min(limit * DIGEST_BYTES, len(digests)), DIGEST_BYTES):
            page = page_of.get(digests[at : at + DIGEST_BYTES])
            if page is None or not is_listed[page]:
                break
            more.append(page)
        pages = np.append(known, np.array(more, np.int32)) if more else known
        self._found = _Found(digests, self._removals, pages)
        return pages[:limit]

    def add(self, pages: list[int], digests: bytes) -> list[int]:
        """``pages``, which somebody holds, hold what ``digests`` names, 16 bytes each; those new here.

        A digest that another page has stays with it. Raises RuntimeError if a page has another digest.
        """
        page_of, digest_of, is_listed = self._page_of, self._digest_of, self._listed
        new: list[int] = []
        at = 0
        for page in pages:
            digest = digests[at : at + DIGEST_BYTES]
            at += DIGEST_BYTES
            known = page_of.setdefault(digest, page)
            if known != page:
                if is_listed[known]:
                    continue
                digest_of[known] = None
                page_of[digest] = page
            before = digest_of[page]
            if before != digest:
                if is_listed[page]:
                    del page_of[digest]
                    raise RuntimeError(
                        f"page {page} holds what {digest_of[page]!r} names, filed as {digest!r}"
                    )
                if before is not None:
                    del page_of[before]
                digest_of[page] = digest
            if not is_listed[page]:
                is_listed[page] = 1
                new.append(page)
        self._count += len(new)
        self.changes += 1
        return new

    def rest(self, pages: Pages) -> None:
        """Nobody holds ``pages`` (distinct) any more: they may be evicted, the first of them first."""
        if self._end + pages.size > self._log.size:
            self._compact()
        start, end = self._end, self._end + pages.size
        self._log[start:end] = pages
        self._entry[pages] = np.arange(start, end)
        self._end = end
        self.resting += pages.size

    def wake(self, pages: Pages) -> None:
        """Somebody holds ``pages``, which rested."""
        self._entry[pages] = _AWAKE
        self.resting -= pages.size

    def evict(self, count: int) -> Pages:
        """Forget the ``count`` pages that have rested longest: int32 [count]. At least so many rest."""
        taken: list[Pages] = []
        left = count
        while left:
            start = self._start
            entries = self._log[start : min(self._end, start + 2 * left)]
            if not entries.size:
                raise RuntimeError(f"{left} of {count} pages to evict were not found, {self.resting} rest")
            valid = (self._entry[entries] == np.arange(start, start + entries.size)).nonzero()[0][:left]
            taken.append(entries[valid])
            left -= valid.size
            self._start = start + (entries.size if left else int(valid[-1]) + 1)
        pages = taken[0].copy() if len(taken) == 1 else np.concatenate(taken)
        self.wake(pages)
        self.forget(pages)
        return pages

    def forget(self, pages: Pages) -> None:
        """Take ``pages``, which are awake, out of the index."""
        self._listed_column[pages] = 0
        self._count -= pages.size
        self._removals += 1
        self.changes += 1

    def rests(self) -> Pages:
        """The pages that rest, in the order in which they would go."""
        entries = self._log[self._start : self._end]
        resting: Pages = entries[self._entry[entries] == np.arange(self._start, self._end)]
        return resting

    def holds(self, page: int) -> bytes | None:
        """What ``page`` is filed as."""
        return self._digest_of[page] if self._listed[page] else None

    def _compact(self) -> None:
        """Move the entries that count to the start of the log: half of it is free then, at least."""
        pages = self.rests()
        self._log[: pages.size] = pages
        self._entry[pages] = np.arange(pages.size)
        self._start, self._end = 0, pages.size
