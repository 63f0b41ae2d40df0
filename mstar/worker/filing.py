"""Filing: full pages enter the prefix index once the step that filled them has landed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mstar.messages.prefix import DIGEST_BYTES, page_digests
from mstar.worker.ledger import Ledger
from mstar.worker.limits import Limits
from mstar.worker.slots import Slots

__all__ = ["Filing"]

_PAGES_AT_ONCE = 16
"""So many pages of generated tokens are hashed and filed together; the rest of a row when it ends."""

_NEVER = 1 << 30
"""``filed`` of a row of which nothing is: no row has so many pages."""

_MOST_ROWS = 4
"""Rows whose pages are filed after one step; who is over waits for the next one."""


class Filing:
    """The digests of the rows in their slots, and how far each row's pages are filed.

    The digests of a prompt come with it; those of generated tokens are computed here, a few a step, with
    the key ``salt``. They are filed only where other requests may share them (``limits.prefix_cache``).
    """

    def __init__(self, limits: Limits, slots: Slots, ledger: Ledger, salt: bytes) -> None:
        self._slots = slots
        self._ledger = ledger
        self._page_size = limits.page_size
        self._grows = limits.prefix_cache
        self._salt = salt
        self._round = limits.page_round
        self._steps_left = 0
        self._digests: dict[int, bytes] = {}

    def bind(self, slot: int, digests: bytes, leased: int, prompt_tokens: int) -> None:
        """``slot`` holds a row whose first ``leased`` pages are filed; without digests none ever is."""
        whole = len(digests) // DIGEST_BYTES >= prompt_tokens // self._page_size
        if digests or (self._grows and whole):
            self._digests[slot] = digests
            self._slots.filed[slot] = leased
        else:
            self._slots.filed[slot] = _NEVER

    def release(self, slot: int) -> bytes:
        """``slot`` is free again; returns the digests of its row."""
        return self._digests.pop(slot, b"")

    def chunk(self, slot: int, end: int) -> None:
        """The input of ``slot`` has landed up to token ``end``."""
        digests = self._digests.get(slot)
        if digests:
            self._file(slot, digests, min(end // self._page_size, len(digests) // DIGEST_BYTES))

    def decodes(self, rows: NDArray[np.int64], counter: NDArray[np.int32]) -> None:
        """A step of the slots ``rows`` has landed, which had generated ``counter`` tokens before it.

        Every so many steps the rows that have filled several pages since then have them filed.
        """
        self._steps_left -= 1
        if self._steps_left >= 0 or not (self._grows and self._digests):
            return
        slots = self._slots
        full = (slots.base[rows] + counter) // self._page_size
        due = (full >= slots.filed[rows] + _PAGES_AT_ONCE).nonzero()[0]
        self._steps_left = self._round - 1 if due.size <= _MOST_ROWS else 0
        for place in due[:_MOST_ROWS].tolist():
            self.row(int(rows[place]), int(full[place]))

    def row(self, slot: int, full: int) -> None:
        """The first ``full`` pages of ``slot`` hold tokens that have landed, prompt and generated."""
        digests = self._digests.get(slot)
        if digests is None:
            return
        size, known = self._page_size, len(digests) // DIGEST_BYTES
        if full > known and self._grows:
            tokens = self._slots.history[slot, known * size : full * size]
            digests += page_digests(tokens, size, self._salt, digests[-DIGEST_BYTES:])
            self._digests[slot] = digests
            known = full
        self._file(slot, digests, min(full, known))

    def _file(self, slot: int, digests: bytes, full: int) -> None:
        filed = int(self._slots.filed[slot])
        if full <= filed:
            return
        pages = self._slots.table[slot, filed:full]
        self._ledger.file(pages, digests[filed * DIGEST_BYTES : full * DIGEST_BYTES])
        self._slots.filed[slot] = full
