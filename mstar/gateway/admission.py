"""The way to one decider: prompts into its slab, admissions and aborts onto its ring."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.gateway.errors import not_ready, overloaded
from mstar.messages.request import Abort, Admit, Sampling, encode_control
from shm.errors import Poisoned, SlabExhausted
from shm.slab import SlabHandle, SlabOwner

if TYPE_CHECKING:
    from actors.context import Context

__all__ = ["Admission", "AdmissionStatistics", "Sequence"]


class Sequence(NamedTuple):
    """One sequence to admit; ``prompt`` is int32 [n]."""

    id: int
    prompt: NDArray[np.int32]
    max_tokens: int
    min_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]


class AdmissionStatistics(NamedTuple):
    """Counts since the start, and aborts that still wait for room."""

    admitted: int
    full: int
    aborted: int
    waiting_aborts: int


class Admission:
    """Sends to decider ``index``. The ring and the slab are looked up each time: a restart replaces them."""

    def __init__(self, ctx: Context, index: int) -> None:
        self._ctx = ctx
        self._channel = f"admit/{index}"
        self._slab = f"prompts/{index}"
        self._unsent: deque[int] = deque()
        self._admitted = self._full = self._aborted = 0

    def admit(self, sequences: list[Sequence]) -> None:
        """Send all sequences or none. Raises ApiError 429 where ring or slab is full, 503 where dead."""
        sent: list[int] = []
        try:
            for sequence in sequences:
                self._send(sequence)
                sent.append(sequence.id)
        except SlabExhausted as error:
            self._refuse(sent)
            raise overloaded("Too many prompts wait to be served; try again a little later.") from error
        except Poisoned as error:
            raise not_ready(
                "The model is being restarted; try again a little later.", "restarting"
            ) from error
        self._admitted += len(sent)

    def _refuse(self, sent: list[int]) -> None:
        self._full += 1
        for id in sent:
            self.abort(id)

    def _send(self, sequence: Sequence) -> None:
        slab = self._ctx.slabs[self._slab]
        if not isinstance(slab, SlabOwner):
            raise TypeError(f"slab {self._slab} must be owned by the gateway")
        prompt = np.ascontiguousarray(sequence.prompt, np.int32)
        handle: SlabHandle = slab.lease(prompt.nbytes)
        np.frombuffer(slab.view(handle), np.int32)[:] = prompt
        message = Admit(
            request=sequence.id,
            attempt=0,
            prompt=handle,
            prompt_tokens=len(prompt),
            max_tokens=sequence.max_tokens,
            sampling=sequence.sampling,
            stop_ids=sequence.stop_ids,
            min_tokens=sequence.min_tokens,
        )
        if not self._ctx.outbox[self._channel].send(encode_control(message)):
            slab.release(handle)
            raise SlabExhausted(f"the admission ring {self._channel} is full")

    def abort(self, id: int) -> None:
        """Have the decider drop a sequence. Never lost: without room it waits for `flush`."""
        self._unsent.append(id)
        self._aborted += 1
        self.flush()

    def flush(self) -> bool:
        """Send the aborts that wait; returns whether none is left."""
        ring = self._ctx.outbox[self._channel]
        try:
            while self._unsent and ring.send(encode_control(Abort(self._unsent[0])), control=True):
                self._unsent.popleft()
        except Poisoned:
            self._unsent.clear()
        return not self._unsent

    def reset(self) -> None:
        """The decider died: what it was to drop is gone with it."""
        self._unsent.clear()

    def statistics(self) -> AdmissionStatistics:
        """A snapshot."""
        return AdmissionStatistics(self._admitted, self._full, self._aborted, len(self._unsent))
