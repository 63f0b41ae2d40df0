"""The waiting line: sequences without a slot, and who is refused a place in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.messages.request import Admit
from mstar.worker.limits import Limits

__all__ = ["Waiting", "WaitingLine", "bind_bytes"]

_BIND_BYTES = 192
_PAIR_BYTES = 16
_ID_BYTES = 5


class Waiting(NamedTuple):
    """A sequence without a slot. ``order`` is its age, ``tokens`` prompt + accepted, int32.

    ``digests`` are those of its full pages, 16 bytes each, empty where nothing may be shared.
    ``release`` gives its input back; None for a preempted sequence, whose tokens are our own copy.
    """

    order: int
    message: Admit
    tokens: NDArray[np.int32]
    digests: bytes
    accepted: int
    release: Callable[[], None] | None


class WaitingLine:
    """By age: first come, first served; preempted sequences keep their age.

    The choices of a request that share its prompt stand aside until the first of them has run it.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entries: dict[int, Waiting] = {}
        self._heap: list[tuple[int, int]] = []
        self._aside: dict[int, list[Waiting]] = {}
        self._first: dict[int, int] = {}
        self._joined = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self._first)

    @property
    def ready(self) -> bool:
        """Whether somebody stands in line, not only aside."""
        return bool(self._entries)

    def join(
        self,
        message: Admit,
        tokens: NDArray[np.int32],
        digests: bytes,
        release: Callable[[], None],
        *,
        first: int | None = None,
    ) -> tuple[int, str] | None:
        """Append a newcomer, or say (status, reason) why it is refused.

        With ``first`` it stands aside until that request's prompt has run.
        """
        refusal = self._refusal(message, tokens.size)
        if refusal is None:
            self._joined += 1
            entry = Waiting(self._joined, message, tokens, digests, message.accepted, release)
            if first is None:
                self._stand(entry)
            else:
                self._aside.setdefault(first, []).append(entry)
                self._first[message.request] = first
        return refusal

    def rejoin(self, entry: Waiting) -> None:
        """A preempted sequence is back, by its age."""
        self._stand(entry)

    def call(self, first: int) -> None:
        """The prompt of ``first`` has run: who stood aside for it stands in line."""
        for entry in self._aside.pop(first, ()):
            del self._first[entry.message.request]
            self._stand(entry)

    def succeed(self, first: int) -> None:
        """The prompt of ``first`` will never run: the next of those who stood aside for it runs it."""
        aside = self._aside.pop(first, None)
        if aside:
            entry = aside.pop(0)
            request = entry.message.request
            del self._first[request]
            self._stand(entry)
            if aside:
                self._aside[request] = aside
                self._first.update((each.message.request, request) for each in aside)

    def head(self) -> Waiting | None:
        """Whose turn it is."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = entries.get(heap[0][1])
            if entry is not None and entry.order == heap[0][0]:
                return entry
            heapq.heappop(heap)
        return None

    def advance(self) -> None:
        """The head has got its slot."""
        del self._entries[heapq.heappop(self._heap)[1]]

    def remove(self, request: int) -> bool:
        """Forget ``request`` and give its input back; False if it does not wait here."""
        entry = self._entries.pop(request, None)
        if entry is not None:
            self.succeed(request)
        else:
            first = self._first.pop(request, None)
            if first is None:
                return False
            aside = self._aside[first]
            entry = next(each for each in aside if each.message.request == request)
            aside.remove(entry)
            if not aside:
                del self._aside[first]
        if entry.release is not None:
            entry.release()
        return True

    def requests(self) -> list[int]:
        """Everyone who waits."""
        return [*self._entries, *self._first]

    def _stand(self, entry: Waiting) -> None:
        self._entries[entry.message.request] = entry
        heapq.heappush(self._heap, (entry.order, entry.message.request))

    def _refusal(self, message: Admit, tokens: int) -> tuple[int, str] | None:
        limits = self._limits
        most = message.prompt_tokens + message.max_tokens
        if message.prompt_tokens < 1 or not 0 <= message.accepted < message.max_tokens:
            counts = f"{message.accepted} of {message.max_tokens} tokens generated"
            return 400, f"{counts} after {message.prompt_tokens} of a prompt: one each is due at least"
        if tokens != message.prompt_tokens + message.accepted:
            return 400, f"{tokens} tokens came with a prompt of {message.prompt_tokens} + {message.accepted}"
        if most > limits.max_seq_len:
            return 400, f"{most} tokens asked for, at most {limits.max_seq_len} fit"
        pages = limits.pages_of(most - 1)
        if pages > limits.pages:
            return 400, f"{pages} KV pages needed, the cache has {limits.pages}: shorten the request"
        if bind_bytes(message) > limits.bind_bytes:
            return 400, "the sampling parameters are too large for a step"
        if len(self) >= limits.max_waiting:
            return 429, f"{limits.max_waiting} requests already wait for a slot"
        return None


def bind_bytes(message: Admit) -> int:
    """An upper bound on what the bind of ``message`` takes in a step's tail."""
    return _BIND_BYTES + _PAIR_BYTES * len(message.sampling.logit_bias) + _ID_BYTES * len(message.stop_ids)
