"""Rows that sample late: under a mask which needs their last token on the host, as a grammar does.

Such a row runs up to its logits and holds them. The next step begins with drawing from them, and the token
that was drawn is on the host long before that step has landed: in time for the mask of the step after it.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from mstar.messages.step import Mask
from mstar.worker.limits import Limits

__all__ = ["Constraint", "LateRows"]


class Constraint(Protocol):
    """What the tokens of one sequence are held to."""

    def allowed(self) -> bytes:
        """The tokens that may come next: bit t % 8 of byte t // 8 is set for token t, at least one."""
        ...

    def accept(self, token: int) -> None:
        """``token`` came next."""
        ...


class LateRows:
    """The constraints of the sequences that have one, and which of their rows may ride.

    A row rides once its last token is known, the longest waiting first, as many a step as the record has
    room for masks.
    """

    def __init__(self, limits: Limits) -> None:
        self._most = limits.masks
        self._constraints: dict[int, Constraint] = {}
        self._ready: deque[int] = deque()
        self._riding: set[int] = set()

    def __len__(self) -> int:
        return len(self._constraints)

    def constrain(self, request: int, constraint: Constraint) -> None:
        """The tokens of ``request`` are held to ``constraint`` until ``forget``."""
        self._constraints[request] = constraint

    def holds(self, request: int) -> bool:
        """Whether ``request`` has a constraint."""
        return request in self._constraints

    def forget(self, request: int) -> None:
        """``request`` has ended."""
        self._constraints.pop(request, None)

    def ready(self, slot: int) -> None:
        """The row of ``slot`` holds logits, and every token before them is known."""
        self._ready.append(slot)

    def leave(self, slot: int) -> None:
        """The row of ``slot`` is gone."""
        self._riding.discard(slot)
        if slot in self._ready:
            self._ready.remove(slot)

    def next(self) -> list[int]:
        """The slots that ride from now on."""
        found: list[int] = []
        while self._ready and len(self._riding) < self._most:
            slot = self._ready.popleft()
            self._riding.add(slot)
            found.append(slot)
        return found

    def mask(self, slot: int, request: int) -> Mask:
        """What the row of ``slot`` may draw in the step that it rides in now."""
        self._riding.discard(slot)
        return Mask(slot, self._constraints[request].allowed())

    def accept(self, request: int, token: int) -> None:
        """``request`` drew ``token``."""
        constraint = self._constraints.get(request)
        if constraint is not None:
            constraint.accept(token)
