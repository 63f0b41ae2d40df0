"""The rows that prefill: their inputs run in chunks, in the room that decodes leave in a step."""

from __future__ import annotations

from mstar.messages.step import (
    COUNTER,
    END,
    HELD,
    INPUT,
    LATE,
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

__all__ = ["Prefill"]


class _Row:
    """A sequence in a slot whose input has not run to its end; ``start`` is where the next chunk begins."""

    __slots__ = ("slot", "start", "total")

    def __init__(self, slot: int, total: int) -> None:
        self.slot = slot
        self.start = 0
        self.total = total


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

    def __len__(self) -> int:
        return len(self._rows)

    def start(self, slot: int, total: int) -> None:
        """``slot`` was bound to an input of ``total`` tokens."""
        self._rows.append(_Row(slot, total))

    def leave(self, slot: int) -> None:
        """The input of ``slot`` is not needed any more."""
        if self._rows:
            self._rows = [row for row in self._rows if row.slot != slot]

    def write(self, draft: StepDraft, room: int) -> list[int]:
        """Append chunks of ``room`` tokens together, with their pages; the slots whose input ends here."""
        rows = self._rows
        shares = split_fairly([row.total - row.start for row in rows], room, self._floor)
        finals: list[int] = []
        if any(shares):
            draft.rows[START : STRIDE + 1, : draft.n_rows] = -1
            for row, share in zip(rows, shares, strict=True):
                if share:
                    self._write_chunk(draft, row, share)
                    if row.start == row.total:
                        finals.append(row.slot)
            if finals:
                self._rows = [row for row in rows if row.start < row.total]
        return finals

    def _write_chunk(self, draft: StepDraft, row: _Row, share: int) -> None:
        slots, columns = self._slots, draft.rows
        slot, start, n = row.slot, row.start, draft.n_rows
        row.start = end = start + share
        final = end == row.total
        held = int(slots.pages[slot])
        need = self._pages_after_last(row) if final else self._limits.pages_of(end)
        if need > held:
            pages = self._ledger.take(need - held)
            slots.table[slot, held:need] = pages
            slots.pages[slot] = need
            draft.grant(slot, pages)
        draft.request[n] = slots.owner[slot]
        columns[SLOT, n] = slot
        columns[WALK, n] = self._walk
        columns[SOURCE, n] = HELD if start else INPUT
        columns[COUNTER, n] = start
        columns[SAMPLES, n] = final
        columns[LATE, n] = 0
        columns[START, n] = start
        columns[END, n] = end
        columns[TOTAL, n] = row.total
        columns[STRIDE, n] = share
        draft.n_rows = n + 1

    def _pages_after_last(self, row: _Row) -> int:
        """Pages for the whole input, and for the decodes that come before pages are given again."""
        limits, slots, slot = self._limits, self._slots, row.slot
        most = int(slots.base[slot]) + int(slots.cap[slot]) - 1
        return min(limits.pages_of(min(row.total + self._round, most)), int(slots.horizon[slot]))
