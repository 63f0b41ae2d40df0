"""The waiting line: sequences without a slot, and who is refused a place in it."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
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

    ``release`` gives its input back; None for a preempted sequence, whose tokens are our own copy.
    """

    order: int
    message: Admit
    tokens: NDArray[np.int32]
    accepted: int
    release: Callable[[], None] | None


class WaitingLine:
    """First come, first served; preempted sequences keep their age and stand before newcomers."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._line: OrderedDict[int, Waiting] = OrderedDict()
        self._preempted: list[Waiting] = []
        self._joined = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._preempted)

    def join(
        self, message: Admit, tokens: NDArray[np.int32], release: Callable[[], None]
    ) -> tuple[int, str] | None:
        """Append a newcomer, or say (status, reason) why it is refused."""
        refusal = self._refusal(message, tokens.size)
        if refusal is None:
            self._joined += 1
            self._line[message.request] = Waiting(self._joined, message, tokens, message.accepted, release)
        return refusal

    def rejoin(self, entry: Waiting) -> None:
        """A preempted sequence is back, by its age."""
        insort(self._preempted, entry, key=_order)

    def head(self) -> Waiting | None:
        """Whose turn it is."""
        if self._preempted:
            return self._preempted[0]
        return next(iter(self._line.values()), None)

    def advance(self) -> None:
        """The head has got its slot."""
        if self._preempted:
            del self._preempted[0]
        else:
            self._line.popitem(last=False)

    def remove(self, request: int) -> bool:
        """Forget ``request`` and give its input back; False if it does not wait here."""
        entry = self._line.pop(request, None)
        if entry is None:
            for place, other in enumerate(self._preempted):
                if other.message.request == request:
                    entry = self._preempted.pop(place)
                    break
        if entry is None:
            return False
        if entry.release is not None:
            entry.release()
        return True

    def requests(self) -> list[int]:
        """Everyone who waits."""
        return [*self._line, *(entry.message.request for entry in self._preempted)]

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
        if len(self._line) >= limits.max_waiting:
            return 429, f"{limits.max_waiting} requests already wait for a slot"
        return None


def bind_bytes(message: Admit) -> int:
    """An upper bound on what the bind of ``message`` takes in a step's tail."""
    return _BIND_BYTES + _PAIR_BYTES * len(message.sampling.logit_bias) + _ID_BYTES * len(message.stop_ids)


def _order(entry: Waiting) -> int:
    return entry.order
