"""Where the tokens of steps land on the host: a small ring of slot-indexed columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["ResultRing", "ResultSlot"]

TOP = 20


class ResultSlot:
    """One step's results by slot: ``tokens`` int32 [slots], and the logprob columns once asked for.

    ``failed`` is what to tell every row of a failed step, ``failed_slots`` what to tell single rows.
    ``elapsed_ns`` is how long the device ran the step.
    """

    __slots__ = (
        "elapsed_ns",
        "failed",
        "failed_slots",
        "logprob",
        "scored",
        "tokens",
        "top_ids",
        "top_logprobs",
    )

    def __init__(self, slots: int) -> None:
        self.tokens: NDArray[np.int32] = np.full(slots, -1, np.int32)
        self.logprob: NDArray[np.float32] | None = None
        self.top_ids: NDArray[np.int32] | None = None
        self.top_logprobs: NDArray[np.float32] | None = None
        self.scored = False
        self.failed: str | None = None
        self.failed_slots: dict[int, str] = {}
        self.elapsed_ns = 0

    def score(self) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        """The logprob columns, allocated when first needed: [slots], [slots, 20], [slots, 20]."""
        if self.logprob is None or self.top_ids is None or self.top_logprobs is None:
            slots = self.tokens.size
            self.logprob = np.full(slots, np.nan, np.float32)
            self.top_ids = np.full((slots, TOP), -1, np.int32)
            self.top_logprobs = np.full((slots, TOP), np.nan, np.float32)
        self.scored = True
        return self.logprob, self.top_ids, self.top_logprobs


class ResultRing:
    """Result slots of the steps that may be in flight, plus the one being read."""

    def __init__(self, slots: int, depth: int) -> None:
        self._ring = [ResultSlot(slots) for _ in range(depth + 2)]

    def begin(self, seq: int) -> ResultSlot:
        """The slot that step ``seq`` writes into."""
        slot = self._ring[seq % len(self._ring)]
        slot.scored = False
        slot.failed = None
        slot.tokens.fill(-1)
        slot.elapsed_ns = 0
        slot.failed_slots = {}
        return slot

    def read(self, seq: int) -> ResultSlot:
        """The slot that step ``seq`` has written, valid until ``depth + 2`` steps later."""
        return self._ring[seq % len(self._ring)]
