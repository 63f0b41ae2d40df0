"""Entry: who of those that wait gets a slot in a step, and where every rank reads its input."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mstar.messages.step import Input
from mstar.worker.ledger import Ledger
from mstar.worker.limits import Limits
from mstar.worker.pipeline import Pipeline
from mstar.worker.slots import Slots
from mstar.worker.waiting import Waiting, WaitingLine, bind_bytes
from shm.errors import SlabExhausted
from shm.slab import SlabHandle

__all__ = ["PROMPTS_SLAB", "REPLAYS_SLAB", "Entrant", "Entry", "Replays"]

PROMPTS_SLAB, REPLAYS_SLAB = 0, 1
"""The slabs a bind's inputs may lie in: the gateway's prompts, the leader's own replays."""


class Replays(Protocol):
    """Where the leader puts the tokens of a preempted row for every rank to read (shm.slab.SlabOwner)."""

    def lease(self, nbytes: int) -> SlabHandle: ...
    def view(self, handle: SlabHandle) -> memoryview: ...
    def release(self, handle: SlabHandle) -> None: ...


class Entrant(NamedTuple):
    """Who enters: where its input is, how many pages it is promised in all, and the first of them, leased."""

    waiting: Waiting
    source: Input
    horizon: int
    leased: NDArray[np.int32]


class Entry:
    """By age, while slots, pages and the record have room.

    Who does not fit is looked at again when pages have come or gone, or others may be shared.
    """

    def __init__(
        self,
        limits: Limits,
        slots: Slots,
        ledger: Ledger,
        line: WaitingLine,
        pipeline: Pipeline[Any, Any],
        replays: Replays,
    ) -> None:
        self._limits = limits
        self._slots = slots
        self._ledger = ledger
        self._line = line
        self._pipeline = pipeline
        self._replays = replays
        self._floor, self._tail = limits.chunk_floor, limits.bind_bytes
        self._left = self._room = 0
        self._blocked = (0, (0, 0))
        self.refusals = 0
        """How often the pages at hand did not do for the next one in line, each time they had changed."""

    def open(self, room: int) -> None:
        """A step has ``room`` tokens for inputs: so many may enter with it as can have a chunk each."""
        self._left = max(1, room // self._floor)
        self._room = self._tail

    def next(self, seq: int) -> Entrant | None:
        """Who enters with step ``seq``; the caller puts it into a slot before it asks again."""
        ledger = self._ledger
        if not (self._left and self._slots.free):
            return None
        waiting = self._line.head()
        if waiting is None or self._blocked == (waiting.order, ledger.moment):
            return None
        self._room -= bind_bytes(waiting.message)
        if self._room < 0:
            return None
        horizon = self._horizon(waiting)
        match = ledger.match(waiting.digests, (waiting.tokens.size - 1) // self._limits.page_size)
        if horizon - match.pages + match.idle > ledger.available:
            self._blocked = (waiting.order, ledger.moment)
            self.refusals += 1
            return None
        source = self._publish(waiting, seq)
        if source is None:
            return None
        self._left -= 1
        self._line.advance()
        return Entrant(waiting, source, horizon, ledger.lease(waiting.digests, match.pages))

    def _horizon(self, waiting: Waiting) -> int:
        """Pages for the whole input and the next tokens of ``waiting``."""
        message, size = waiting.message, waiting.tokens.size
        most = message.prompt_tokens + message.max_tokens - 1
        return self._limits.pages_of(max(size, min(size + self._limits.horizon_tokens, most)))

    def _publish(self, waiting: Waiting, seq: int) -> Input | None:
        """Where every rank reads the input of ``waiting`` when it runs step ``seq``; None: no room now."""
        if waiting.release is not None:
            self._pipeline.lend(seq, waiting.release)
            return Input(0, PROMPTS_SLAB, waiting.message.prompt)
        replays, tokens = self._replays, waiting.tokens
        try:
            handle = replays.lease(tokens.nbytes)
        except SlabExhausted:
            return None
        replays.view(handle)[: tokens.nbytes] = tokens.view(np.uint8).data
        self._pipeline.lend(seq, lambda: replays.release(handle))
        return Input(0, REPLAYS_SLAB, handle)
