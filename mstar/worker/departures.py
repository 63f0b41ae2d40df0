"""Departures: rows that leave their slots, from the plan that drops them to the landing that frees them."""

from __future__ import annotations

from mstar.messages.step import StepDraft
from mstar.worker.ledger import Ledger
from mstar.worker.slots import Slots

__all__ = ["Departures"]


class Departures:
    """Who is to be dropped with the next plan, who is on its way out, and what comes back with them."""

    def __init__(self, slots: Slots, ledger: Ledger) -> None:
        self._slots = slots
        self._ledger = ledger
        self._drops: list[int] = []
        self._leaving: set[int] = set()
        self.preempting: set[int] = set()
        """Slots whose rows queue again once they are free."""
        self.returning_pages = 0
        """Pages of rows on their way out; of these, shared ones stay with their other holders."""

    def __contains__(self, slot: int) -> bool:
        return slot in self._leaving

    @property
    def due(self) -> bool:
        """Whether a plan has somebody to drop."""
        return bool(self._drops)

    def leave(self, slot: int) -> None:
        """Drop ``slot`` in the next plan, and take back what was only promised to it."""
        slots = self._slots
        pages = int(slots.pages[slot])
        self._ledger.withdraw(int(slots.horizon[slot]) - pages)
        slots.horizon[slot] = pages
        self.returning_pages += pages
        self._leaving.add(slot)
        self._drops.append(slot)

    def write(self, draft: StepDraft) -> None:
        """Write the drops that are due."""
        drops = self._drops
        if drops:
            owner = self._slots.owner
            for place, slot in enumerate(drops):
                draft.drops[place] = owner[slot]
            draft.n_drops = len(drops)

    def planned(self) -> list[int]:
        """The plan with these drops is on its way: the slots that return when it has landed."""
        drops, self._drops = self._drops, []
        return drops

    def returned(self, slot: int) -> None:
        """The last step that names ``slot`` has landed: its pages go back."""
        slots = self._slots
        pages = int(slots.pages[slot])
        self._ledger.give(slots.table[slot, :pages])
        self.returning_pages -= pages
        self._leaving.discard(slot)
        self.preempting.discard(slot)
