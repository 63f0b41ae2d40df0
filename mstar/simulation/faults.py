"""Faults: what goes wrong in a run, as data, so that a run can be told, replayed and made smaller."""

from __future__ import annotations

import msgspec

__all__ = ["NO_FAULTS", "Death", "Faults", "Hog", "OutOfMemory", "Planted", "RankFaults"]


class Death(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank ``rank`` dies before event number ``event`` of the run; it is noticed ``notice_ns`` later."""

    event: int
    rank: int
    notice_ns: int = 25_000_000


class OutOfMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The forward of the ``nth`` step with rows (from 1) finds no memory on rank ``rank``."""

    nth: int
    rank: int = 0


class Hog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``pages`` pages of ``node`` (fewer where fewer are available) are held by somebody else for a while."""

    at_ns: int
    for_ns: int
    node: int
    pages: int


class RankFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank: its clock's skew and drift, and how many times slower than the others it is."""

    skew_ns: int = 0
    drift: float = 1.0
    slowness: float = 1.0


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that goes wrong. ``bent`` steps reach a rank (step, rank) with one bit flipped.

    ``restart_ns`` is how long a cell takes to come back; below 0 it never does.
    """

    deaths: tuple[Death, ...] = ()
    memory: tuple[OutOfMemory, ...] = ()
    hogs: tuple[Hog, ...] = ()
    bent: tuple[tuple[int, int], ...] = ()
    ranks: tuple[RankFaults, ...] = ()
    restart_ns: int = 50_000_000

    def of_rank(self, rank: int) -> RankFaults:
        """What is wrong with ``rank``."""
        return self.ranks[rank] if rank < len(self.ranks) else _SOUND


class Planted:
    """The faults of a run that are still to come; each comes once, whatever cell is hit."""

    def __init__(self, faults: Faults) -> None:
        self._memory = {fault.nth: fault.rank for fault in faults.memory}
        self._bent = set(faults.bent)
        self._steps = 0
        self.spent: set[int] = set()
        """Ranks that were handed a bent step."""

    def short_of_memory(self) -> int | None:
        """Another step with rows is planned: the rank that finds no memory for it, if any."""
        self._steps += 1
        return self._memory.pop(self._steps, None)

    def bends(self, seq: int, rank: int) -> bool:
        """Whether step ``seq`` reaches ``rank`` with a flipped bit, this time."""
        if (seq, rank) not in self._bent:
            return False
        self._bent.remove((seq, rank))
        self.spent.add(rank)
        return True


_SOUND = RankFaults()
NO_FAULTS = Faults()
