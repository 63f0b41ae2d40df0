"""A vocabulary made of given byte strings, and the cutting of texts into its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

SPECIAL = 0
UNKNOWN = 99999


class ByteTokenizer:
    """Token 0 is special; token 1 + i stands for pieces[i]."""

    special_ids = frozenset({SPECIAL})
    eos_ids = frozenset({SPECIAL})
    has_bytes = True

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [b"<special>", *pieces]

    def token_bytes(self, token: int) -> bytes | None:
        return self.pieces[token] if token < len(self.pieces) else None

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        visible = [t for t in tokens if not (skip_special_tokens and t in self.special_ids)]
        return b"".join(self.pieces[t] for t in visible).decode("utf-8", "replace")


class PieceTokenizer(ByteTokenizer):
    """The same without bytes: what the stream sees is text alone."""

    has_bytes = False

    def token_bytes(self, token: int) -> bytes | None:
        return None


@st.composite
def cuts(draw: st.DrawFn, raw: bytes) -> list[bytes]:
    """`raw` in pieces, cut anywhere, inside characters too."""
    places = draw(st.lists(st.integers(0, len(raw)), max_size=12))
    edges = [0, *sorted(places), len(raw)]
    return [raw[low:high] for low, high in itertools.pairwise(edges) if low < high]
