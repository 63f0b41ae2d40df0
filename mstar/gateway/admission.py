"""The way to one decider: prompts into its slab, admissions and aborts onto its ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.gateway.errors import ApiError, not_ready, overloaded
from mstar.messages.prefix import DIGEST_BYTES, block_bytes, write_prompt
from mstar.messages.request import Abort, Admit, Sampling, encode_control
from shm.errors import Poisoned, RecordTooLarge, SlabExhausted
from shm.slab import SlabHandle, SlabOwner

if TYPE_CHECKING:
    from actors.context import Context

__all__ = ["Admission", "AdmissionStatistics", "Prompt"]

_HANDLE_BYTES = 24
"""What the numbers of a handle take in a message, at most, beyond those of an empty one."""


class Prompt(NamedTuple):
    """One prompt, int32 tokens, and the ``n`` sequences that continue it, with the ids from ``id`` on.

    ``digests`` are those of its full pages, 16 bytes each, b"" where nothing of it may be shared.
    """

    id: int
    tokens: NDArray[np.int32]
    n: int
    max_tokens: int
    min_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    digests: bytes = b""

    @property
    def hashes(self) -> int:
        """How many digests go with it."""
        return len(self.digests) // DIGEST_BYTES


class AdmissionStatistics(NamedTuple):
    """Counts since the start, and aborts that still wait for room.

    ``unshared`` prompts went without their digests, because these found no room.
    """

    admitted: int
    unshared: int
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
        self._admitted = self._unshared = self._full = self._aborted = 0

    def admit(self, prompts: list[Prompt]) -> None:
        """Send all prompts or none.

        Raises ApiError: 400 where they would not fit a slab and a ring that are empty, 429 where
        these are full, 503 where the decider is dead.
        """
        slab = self._ctx.slabs[self._slab]
        if not isinstance(slab, SlabOwner):
            raise TypeError(f"slab {self._slab} must be owned by the gateway")
        handles: list[SlabHandle] = []
        sent = 0
        try:
            prompts, handles = self._write(slab, prompts)
            ring = self._ctx.outbox[self._channel]
            while sent < len(prompts) and ring.send(_message(prompts[sent], handles[sent])):
                sent += 1
        except (SlabExhausted, RecordTooLarge):
            pass
        except Poisoned as error:
            raise not_ready(
                "The model is being restarted; try again a little later.", "restarting"
            ) from error
        if sent < len(prompts):
            self._take_back(slab, prompts[:sent], handles[sent:])
            raise self._refusal(slab, prompts)
        self._admitted += sum(prompt.n for prompt in prompts)

    def _write(self, slab: SlabOwner, prompts: list[Prompt]) -> tuple[list[Prompt], list[SlabHandle]]:
        """Put all prompts into blocks, or none, without their digests where there is no room for these.

        Returns them as they lie there. Raises SlabExhausted, RecordTooLarge, Poisoned.
        """
        try:
            return prompts, _lease_all(slab, prompts)
        except (SlabExhausted, RecordTooLarge):
            if not any(prompt.hashes for prompt in prompts):
                raise
            bare = [prompt._replace(digests=b"") for prompt in prompts]
        handles = _lease_all(slab, bare)
        self._unshared += sum(prompt.hashes > 0 for prompt in prompts)
        return bare, handles

    def _take_back(self, slab: SlabOwner, sent: list[Prompt], unsent: list[SlabHandle]) -> None:
        self._full += 1
        for handle in unsent:
            slab.release(handle)
        for prompt in sent:
            for id in range(prompt.id, prompt.id + prompt.n):
                self.abort(id)

    def _refusal(self, slab: SlabOwner, prompts: list[Prompt]) -> ApiError:
        ring = self._ctx.outbox[self._channel].ring
        lengths = [len(_message(prompt, SlabHandle(0, 0, 0))) + _HANDLE_BYTES for prompt in prompts]
        records = sum((length + 71) & -64 for length in lengths)  # see RingWriter.room
        sizes = [prompt.tokens.nbytes for prompt in prompts]
        if fits_empty(sizes, slab.pool.classes) and records <= ring.capacity - ring.reserved:
            return overloaded("Too many prompts wait to be served; try again a little later.")
        return ApiError(
            400,
            f"The {len(prompts)} prompts of this request are too much to be admitted at once; send fewer.",
            param="prompt",
            code="request_too_large",
        )

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
        return AdmissionStatistics(
            self._admitted, self._unshared, self._full, self._aborted, len(self._unsent)
        )


def _lease_all(slab: SlabOwner, prompts: list[Prompt]) -> list[SlabHandle]:
    """A block for each prompt, filled; none where one finds no room."""
    handles: list[SlabHandle] = []
    try:
        for prompt in prompts:
            handle = slab.lease(block_bytes(len(prompt.tokens), prompt.hashes))
            handles.append(handle)
            write_prompt(slab.view(handle), prompt.tokens, prompt.digests)
    except (SlabExhausted, RecordTooLarge):
        for handle in handles:
            slab.release(handle)
        raise
    return handles


def fits_empty(sizes: list[int], classes: Sequence[tuple[int, int]]) -> bool:
    """Whether prompts of these sizes in bytes find a block each where all are free.

    ``classes`` are (bytes of a block, number of blocks), ascending; a block takes any smaller prompt.
    """
    if max(sizes, default=0) > classes[-1][0]:
        return False
    blocks = 0
    for place in reversed(range(len(classes))):
        blocks += classes[place][1]
        smaller = classes[place - 1][0] if place else -1
        if sum(size > smaller for size in sizes) > blocks:
            return False
    return True


def _message(prompt: Prompt, handle: SlabHandle) -> bytes:
    return encode_control(
        Admit(
            request=prompt.id,
            attempt=0,
            prompt=handle,
            prompt_tokens=len(prompt.tokens),
            max_tokens=prompt.max_tokens,
            sampling=prompt.sampling,
            stop_ids=prompt.stop_ids,
            min_tokens=prompt.min_tokens,
            count=prompt.n,
            hashes=prompt.hashes,
        )
    )
