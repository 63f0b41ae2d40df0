"""The oracle: the null model's whole answer to every sequence, known before the first step runs.

A place of a sequence holds a fingerprint of all tokens up to it, as a KV cache does; the next token
depends on that fingerprint and on the sequence's id. Equal beginnings have equal fingerprints, so pages
may be shared, and whatever reads a wrong page finds another fingerprint there.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.messages.tokens import LENGTH, STOP
from mstar.simulation.invariants import Broken

__all__ = ["MASK_BYTES", "Foreseen", "Oracle", "Sequence", "text_of"]

_MULTIPLIER, _INCREMENT, _MASK = 6364136223846793005, 1442695040888963407, (1 << 63) - 1
_GOLDEN = 0x9E3779B97F4A7C15
MASK_BYTES = 8
_LOWEST, _TOKENS = 100, 50_000


class Sequence(NamedTuple):
    """One sequence that is owed.

    ``tokens`` int32 is the prompt and everything that would be generated up to the cap, ``marks`` int64
    the fingerprint at each of their places. ``due`` is how many tokens the client is owed, ``finish``
    how it ends, ``refused`` that its bind is refused by every rank, ``late`` that it draws under masks.
    """

    prompt: int
    tokens: NDArray[np.int32]
    marks: NDArray[np.int64]
    due: int
    finish: int
    refused: bool
    late: bool

    def generated(self, place: int) -> int:
        """The ``place``-th generated token, from 1; the last one for a larger place."""
        return int(self.tokens[min(self.prompt + place, self.tokens.size) - 1])

    def until(self, token: int) -> Sequence:
        """The sequence that ends with the first generated token equal to ``token``, if one is due."""
        hits = (self.tokens[self.prompt : self.prompt + self.due] == token).nonzero()[0]
        return self._replace(due=int(hits[0]) + 1, finish=STOP) if hits.size else self


class Oracle:
    """All sequences of a run by id."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}

    def foresee(
        self,
        request: int,
        prompt: NDArray[np.int32],
        max_tokens: int,
        *,
        refused: bool = False,
        late: bool = False,
    ) -> Sequence:
        """The answer to ``prompt``, of ``max_tokens`` tokens."""
        tokens = prompt.tolist()
        size = len(tokens)
        marks = []
        mark = 0
        for token in tokens:
            mark = (mark * _MULTIPLIER + token + _INCREMENT) & _MASK
            marks.append(mark)
        key = request * _GOLDEN & _MASK
        for _ in range(max_tokens):
            token = _LOWEST + ((((mark ^ key) * _MULTIPLIER) & _MASK) >> 24) % _TOKENS
            mark = (mark * _MULTIPLIER + token + _INCREMENT) & _MASK
            tokens.append(token)
            marks.append(mark)
        found = Sequence(
            size, np.array(tokens, np.int32), np.array(marks, np.int64), max_tokens, LENGTH, refused, late
        )
        self.sequences[request] = found
        return found


class Foreseen:
    """The constraint of a sequence that draws late: its masks say for which token they are."""

    def __init__(self, request: int, owed: Sequence) -> None:
        self._request = request
        self._owed = owed
        self._count = 0

    def allowed(self) -> bytes:
        """The mask of the next token."""
        return mask_of(self._request, self._count)

    def accept(self, token: int) -> None:
        """A token was drawn. Raises Broken if another one is due."""
        due = int(self._owed.tokens[self._owed.prompt + self._count])
        if token != due:
            raise Broken(
                "constraint", f"sequence {self._request} drew {token} at {self._count}, due is {due}"
            )
        self._count += 1


def mask_of(request: int, count: int) -> bytes:
    """The mask under which ``request`` draws the token after ``count``."""
    return struct.pack("<II", request, count)


def text_of(token: int) -> str:
    """What the null model's vocabulary writes for ``token``."""
    return f"<{token}>"
