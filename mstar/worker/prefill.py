"""The rows that prefill: their inputs run in chunks, in the room that decodes leave in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mstar.messages.step import (
    COUNTER,
    END,
    HELD,
    INPUT,
    LATE,
    LATE_RUN,
    SAMPLES,
    SLOT,
    SOURCE,
    START,
    STRIDE,
    TOTAL,
    WALK,
    StepDraft,
)
from mstar.worker.batch import split_fairly
from mstar.worker.ledger import Ledger
from mstar.worker.limits import Limits
from mstar.worker.slots import Slots

__all__ = ["Chunk", "Prefill"]


class Chunk(NamedTuple):
    """Tokens up to ``end`` of the input of ``slot`` run in a step; the input ends there if ``final``."""

    slot: int
    end: int
    final: bool


class _Row:
    """A sequence in a slot whose input has not run to its end.

    ``start`` is where the next chunk begins; ``fresh`` until its first one, which may start past pages
    that were leased.
    """

    __slots__ = ("fresh", "slot", "start", "total")

    def __init__(self, slot: int, start: int, total: int) -> None:
        self.slot = slot
        self.start = start
        self.total = total
        self.fresh = True


class Prefill:
    """Rows in the order they were bound, and the cutting of their inputs."""

    def __init__(self, limits: Limits, slots: Slots, ledger: Ledger, walk: int) -> None:
        self._limits = limits
        self._slots = slots
        self._ledger = ledger
        self._walk = walk
        self._floor = limits.chunk_floor
        self._round = limits.page_round
        self._rows: list[_Row] = []
        self._crowded = False

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def past(self) -> float:
        """How many tokens the rows hold already, on average over the tokens to come."""
        left = sum(row.total - row.start for row in self._rows)
        return sum(row.start * (row.total - row.start) for row in self._rows) / left if left else 0.0

    def start(self, slot: int, start: int, total: int) -> None:
        """``slot`` was bound to an input of ``total`` tokens, whose first ``start`` lie in leased pages."""
        self._rows.append(_Row(slot, start, total))

    def leave(self, slot: int) -> None:
        """The input of ``slot`` is not needed any more."""
        if self._rows:
            self._rows = [row for row in self._rows if row.slot != slot]

    def write(self, draft: StepDraft, room: int) -> list[Chunk]:
        """Append chunks of ``room`` tokens together, with their pages."""
        rows = self._rows
        remaining = [row.total - row.start for row in rows]
        shares = self._split(remaining, room) if self._limits.chunked else _whole(remaining, room)
        chunks: list[Chunk] = []
        if any(shares):
            draft.rows[START : STRIDE + 1, : draft.n_rows] = -1
            for row, share in zip(rows, shares, strict=True):
                if share and self._write_chunk(draft, row, share):
                    chunks.append(Chunk(row.slot, row.start, row.start == row.total))
            if any(chunk.final for chunk in chunks):
                self._rows = [row for row in rows if row.start < row.total]
        return chunks

    def _split(self, remaining: list[int], room: int) -> list[int]:
        """Fair shares of ``room``; if that is too little for all, every other step begins with the shortest.

        In such steps the oldest row alone may take all there is, step after step; a short one does not wait
        for that.
        """
        place = remaining.index(min(remaining)) if self._crowded and remaining else 0
        if place:
            remaining = [remaining[place], *remaining[:place], *remaining[place + 1 :]]
        shares = split_fairly(remaining, room, self._floor)
        self._crowded = not self._crowded and 0 in shares
        return [*shares[1 : place + 1], shares[0], *shares[place + 1 :]] if place else shares

    def _write_chunk(self, draft: StepDraft, row: _Row, share: int) -> bool:
        """Append one chunk; False where the record has no room left for its pages."""
        slots, columns = self._slots, draft.rows
        slot, start, n = row.slot, row.start, draft.n_rows
        end = start + share
        final = end == row.total
        held = int(slots.pages[slot])
        leased = held if row.fresh else 0
        need = max(held, self._pages_after_last(row) if final else self._limits.pages_of(end))
        if draft.n_grants + leased + need - held > draft.grants.shape[1]:
            return False
        if leased:
            draft.grant(slot, slots.table[slot, :leased])
        if need > held:
            pages = self._ledger.take(need - held)
            slots.table[slot, held:need] = pages
            slots.pages[slot] = need
            draft.grant(slot, pages)
        draft.request[n] = slots.owner[slot]
        columns[SLOT, n] = slot
        columns[WALK, n] = self._walk
        columns[SOURCE, n] = INPUT if row.fresh else HELD
        columns[COUNTER, n] = 0 if row.fresh else start
        late = final and int(slots.late[slot])
        columns[SAMPLES, n] = final and not late
        columns[LATE, n] = LATE_RUN if late else 0
        columns[START, n] = start
        columns[END, n] = end
        columns[TOTAL, n] = row.total
        columns[STRIDE, n] = end if row.fresh else share
        draft.n_rows = n + 1
        row.start = end
        row.fresh = False
        return True

    def _pages_after_last(self, row: _Row) -> int:
        """Pages for the whole input, and for the decodes that come before pages are given again."""
        limits, slots, slot = self._limits, self._slots, row.slot
        most = int(slots.base[slot]) + int(slots.cap[slot]) - 1
        return min(limits.pages_of(min(row.total + self._round, most)), int(slots.horizon[slot]))


def _whole(remaining: Sequence[int], room: int) -> list[int]:
    """Inputs that run whole: in their order while they fit, and the first in any case."""
    shares = [0] * len(remaining)
    for place, need in enumerate(remaining):
        if place and need > room:
            break
        shares[place] = need
        room -= need
    return shares
