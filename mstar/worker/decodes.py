"""The rows that decode: which ride in a step, and how each comes by its next page."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.messages.step import CARRY, COUNTER, LATE, LATE_LAST, LATE_RUN, SLOT, WALK, StepDraft
from mstar.worker.ledger import Ledger
from mstar.worker.limits import Limits
from mstar.worker.slots import Slots

__all__ = ["NO_ROWS", "DecodeRows", "Decodes"]

Places = NDArray[np.int64]

_NO_PLACES: Places = np.empty(0, np.int64)
_ONE: NDArray[np.int32] = np.array(1, np.int32)


class DecodeRows(NamedTuple):
    """The decode rows of one step, in slot order.

    ``slots`` and ``request`` are int64 [n], ``counter`` int32 [n] the tokens that each had generated
    before; ``ending`` are the places of those that reach their cap.
    """

    slots: Places
    request: NDArray[np.int64]
    counter: NDArray[np.int32]
    ending: Places


NO_ROWS = DecodeRows(_NO_PLACES, _NO_PLACES, np.empty(0, np.int32), _NO_PLACES)


class Decodes:
    """Every row whose input has run rides in every step, but for those that no page is left for.

    Pages come in rounds: every so many steps each row that would run out before the next round gets
    one, so that most steps give none. Where pages are tight, every step is a round for what it needs.
    """

    def __init__(self, limits: Limits, slots: Slots, ledger: Ledger, walk: int) -> None:
        self._limits = limits
        self._slots = slots
        self._ledger = ledger
        self._page_size: NDArray[np.int32] = np.array(limits.page_size, np.int32)
        self._max_pages: NDArray[np.int64] = np.array(slots.max_pages, np.int64)
        self._constants: NDArray[np.int32] = np.array([[walk], [CARRY], [1], [0]], np.int32)
        self._round = limits.page_round
        self._round_steps: NDArray[np.int32] = np.array(limits.page_round, np.int32)
        self._steps_left = 0
        self._tight = False
        self.stalled: list[int] = []
        """Slots that sit out until a page comes back."""
        self.stalls = 0

    def start(self, slot: int) -> bool:
        """The input of ``slot`` runs to its end and gives a token; then it rides, if that wasn't its last."""
        slots = self._slots
        planned, cap = int(slots.planned[slot]) + 1, int(slots.cap[slot])
        slots.planned[slot] = planned
        if planned >= cap:
            return False
        self.ride(slot)
        return True

    def ride(self, slot: int) -> None:
        """``slot`` rides from the next step on; pages are given early if its own would not last."""
        slots = self._slots
        slots.ride[slot] = True
        planned = int(slots.planned[slot]) + int(slots.late[slot])
        last = int(slots.base[slot]) + min(planned + self._steps_left, int(slots.cap[slot])) - 1
        if last > int(slots.pages[slot]) * self._limits.page_size:
            self._steps_left = 0

    def leave(self, slot: int) -> None:
        """``slot`` rides no more and needs no page."""
        self._slots.ride[slot] = False
        if slot in self.stalled:
            self.stalled.remove(slot)

    # ---- pages -------------------------------------------------------------------------------

    def grow(self, draft: StepDraft, make_room: Callable[[int], None]) -> None:
        """Give the rows that are about to run out of pages the next one; who gets none sits this step out.

        ``make_room(pages)`` is asked for what could not be given; it may let rows leave.
        """
        if self._steps_left:
            self._steps_left -= 1
            return
        slots = self._slots
        rows = slots.ride[: slots.high].nonzero()[0]
        if not self._tight:
            hungry = self._hungry(rows, self._round_steps)
            held = slots.pages[hungry]
            lacking = hungry[held >= slots.horizon[hungry]]
            self._tight = not all(self._extend(slot, 1) for slot in lacking.tolist())
            if not self._tight:
                self._steps_left = self._round - 1
                if hungry.size:
                    self._give(draft, hungry, held)
                return
        self._grow_by_age(draft, self._hungry(rows, _ONE).tolist(), make_room)

    def _hungry(self, rows: Places, steps: NDArray[np.int32]) -> Places:
        """Those of ``rows`` that lack a page for one of their next ``steps`` steps."""
        slots = self._slots
        late = slots.late[rows]
        last: NDArray[np.int32] = np.minimum(slots.planned[rows] + steps + late, slots.cap[rows])
        last += slots.base[rows]
        last -= _ONE
        lacks: NDArray[np.bool_] = last > slots.pages[rows] * self._page_size
        return rows[lacks]

    def _grow_by_age(self, draft: StepDraft, short: list[int], make_room: Callable[[int], None]) -> None:
        """The oldest rows first, while promises and pages last."""
        slots = self._slots
        hungry = sorted((*short, *self.stalled), key=slots.order.__getitem__)
        granted: list[int] = []
        stalled: list[int] = []
        for place, slot in enumerate(hungry):
            if slots.pages[slot] < slots.horizon[slot] or self._extend(slot, len(hungry) - place):
                granted.append(slot)
            else:
                stalled.append(slot)
        slots.ride[granted] = True
        slots.ride[stalled] = False
        self.stalled = stalled
        self.stalls += len(stalled)
        self._tight = bool(stalled) or self._ledger.available < slots.high
        if stalled:
            make_room(len(stalled))
            granted = [slot for slot in granted if slots.ride[slot]]  # not who had to leave just now
        if granted:
            index = np.array(granted, np.int64)
            self._give(draft, index, slots.pages[index])

    def _extend(self, slot: int, sharers: int) -> bool:
        """Move the horizon of ``slot`` on by its share of what is available; False if there is nothing."""
        slots, ledger, limits = self._slots, self._ledger, self._limits
        last = limits.pages_of(int(slots.base[slot]) + int(slots.cap[slot]) - 1)
        want = min(limits.pages_of(limits.horizon_tokens), last - int(slots.pages[slot]))
        available = ledger.available
        more = min(want, available, max(1, available // sharers))
        if more < 1:
            return False
        ledger.promise(more)
        slots.horizon[slot] += more
        return True

    def _give(self, draft: StepDraft, rows: Places, held: NDArray[np.int32]) -> None:
        """One page to each slot of ``rows`` (distinct), which hold ``held`` pages each."""
        slots = self._slots
        pages = self._ledger.take(rows.size)
        slots.flat_table[rows * self._max_pages + held] = pages
        slots.pages[rows] = held + _ONE
        draft.grant(rows, pages)

    # ---- rows --------------------------------------------------------------------------------

    def write(self, draft: StepDraft, *, late: bool = False) -> DecodeRows:
        """Write every row that rides, and move its counter on; a row that reaches its cap rides no more.

        ``late``: some may draw under masks, and ride on when what they draw here is known.
        """
        slots = self._slots
        rows = slots.ride[: slots.high].nonzero()[0]
        n = rows.size
        if not n:
            return NO_ROWS
        request, counter = slots.owner[rows], slots.planned[rows]
        columns = draft.rows
        draft.request[:n] = request
        columns[SLOT, :n] = rows
        columns[COUNTER, :n] = counter
        columns[WALK : LATE + 1, :n] = self._constants
        draft.n_rows = n
        planned = counter + _ONE
        slots.planned[rows] = planned
        last = planned >= slots.cap[rows]
        if late:
            places = slots.late[rows].nonzero()[0]
            columns[LATE, places] = np.where(last[places], LATE_LAST, LATE_RUN)
            slots.ride[rows[places]] = False
        if not np.count_nonzero(last):
            return DecodeRows(rows, request, counter, _NO_PLACES)
        slots.ride[rows[last]] = False
        return DecodeRows(rows, request, counter, last.nonzero()[0])
