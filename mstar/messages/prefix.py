"""Digests of a prompt's pages, and how a prompt's block holds them behind its tokens.

A digest names everything up to the end of its page: the chain ``d[0] = blake2b(page 0, key)``,
``d[i] = blake2b(d[i - 1] + page i)``, 16 bytes each, over full pages of int32 tokens. The first one is
secret without the key, and so is each that is made with a secret one: who lacks the key can neither compute
one nor look for two prompts with the same.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DIGEST_BYTES",
    "MOST_KEY_BYTES",
    "PromptBlock",
    "block_bytes",
    "digests_at",
    "page_digests",
    "read_prompt",
    "write_prompt",
]

DIGEST_BYTES = 16
MOST_KEY_BYTES = 64
"""blake2b takes no longer key."""

_INT32 = np.dtype(np.int32)


class PromptBlock(NamedTuple):
    """What a prompt's block holds: ``tokens`` int32 [n], a view of the block, and a copy of the digests."""

    tokens: NDArray[np.int32]
    digests: bytes


def page_digests(tokens: NDArray[np.int32], page_size: int, key: bytes, previous: bytes = b"") -> bytes:
    """The digests of the full pages of ``tokens`` (int32 [n]), 16 bytes each, one after the other.

    ``previous`` is the digest of the page before the first of ``tokens``, b"" at the start of a sequence:
    hashing on from it gives what hashing all at once would. Raises ValueError for a key over 64 bytes.
    """
    pages = len(tokens) // page_size
    if not pages:
        return b""
    page_bytes = page_size * _INT32.itemsize
    data = np.ascontiguousarray(tokens[: pages * page_size], _INT32).tobytes()
    digest = previous
    digests = []
    begin = 0
    if not previous:
        begin = page_bytes
        digest = blake2b(data[:page_bytes], key=key, digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
    start = blake2b(digest_size=DIGEST_BYTES)  # to copy one is faster than to make one
    for at in range(begin, len(data), page_bytes):
        page = start.copy()
        page.update(digest + data[at : at + page_bytes])
        digest = page.digest()
        digests.append(digest)
    return b"".join(digests)


def digests_at(tokens: int) -> int:
    """Where in a block of ``tokens`` tokens the digests begin: the next multiple of 8 bytes."""
    return (tokens * _INT32.itemsize + 7) & -8


def block_bytes(tokens: int, hashes: int) -> int:
    """Bytes of a block of ``tokens`` tokens and ``hashes`` digests."""
    if not hashes:
        return tokens * _INT32.itemsize
    return digests_at(tokens) + hashes * DIGEST_BYTES


def write_prompt(block: memoryview, tokens: NDArray[np.int32], digests: bytes = b"") -> None:
    """Fill ``block``, of ``block_bytes(len(tokens), len(digests) // 16)`` bytes, with both."""
    np.frombuffer(block, _INT32, len(tokens))[:] = tokens
    if digests:
        at = digests_at(len(tokens))
        block[at : at + len(digests)] = digests


def read_prompt(block: memoryview | bytes, tokens: int, hashes: int) -> PromptBlock:
    """What a block of ``tokens`` tokens and ``hashes`` digests holds.

    Raises ValueError if the block is too small for that.
    """
    at = digests_at(tokens)
    return PromptBlock(
        np.frombuffer(block, _INT32, tokens),
        np.frombuffer(block, np.uint8, hashes * DIGEST_BYTES, at).tobytes() if hashes else b"",
    )
