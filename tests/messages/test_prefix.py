"""Digests of pages, and the block they travel in."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.messages.prefix import (
    DIGEST_BYTES,
    block_bytes,
    digests_at,
    page_digests,
    read_prompt,
    write_prompt,
)

KEY = b"a key of this start"


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_the_first_digest_is_a_keyed_hash_and_each_other_hashes_the_one_before_with_its_page() -> None:
    found = page_digests(tokens(1, 2, 3, 4, 5), 2, KEY)
    first = hashlib.blake2b(tokens(1, 2).tobytes(), key=KEY, digest_size=16).digest()
    second = hashlib.blake2b(first + tokens(3, 4).tobytes(), digest_size=16).digest()
    assert found == first + second


def test_a_prompt_without_a_full_page_has_no_digest() -> None:
    assert page_digests(tokens(1, 2, 3), 4, KEY) == b""


def test_another_key_gives_other_digests() -> None:
    mine, theirs = (page_digests(tokens(1, 2, 3, 4), 2, key) for key in (KEY, KEY + b"!"))
    assert mine[:DIGEST_BYTES] != theirs[:DIGEST_BYTES]
    assert mine[DIGEST_BYTES:] != theirs[DIGEST_BYTES:]


def test_a_column_of_a_table_hashes_like_its_copy() -> None:
    table = np.arange(64, dtype=np.int32).reshape(8, 8)
    assert page_digests(table[:, 3], 4, KEY) == page_digests(table[:, 3].copy(), 4, KEY)
    assert page_digests(table[:, 3].astype(np.int64), 4, KEY) == page_digests(table[:, 3], 4, KEY)


@given(st.lists(st.integers(0, 3), max_size=24), st.lists(st.integers(0, 3), max_size=24), st.integers(1, 5))
def test_digests_agree_exactly_as_far_as_the_pages_do(one: list[int], other: list[int], size: int) -> None:
    mine, theirs = page_digests(tokens(*one), size, KEY), page_digests(tokens(*other), size, KEY)
    alike = 0
    while alike < min(len(one), len(other)) and one[alike] == other[alike]:
        alike += 1
    for page in range(min(len(mine), len(theirs)) // DIGEST_BYTES):
        at = slice(page * DIGEST_BYTES, (page + 1) * DIGEST_BYTES)
        assert (mine[at] == theirs[at]) == ((page + 1) * size <= alike)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 5), st.integers(0, 8))
def test_a_chain_goes_on_where_it_was_left(ids: list[int], size: int, pages: int) -> None:
    cut = min(pages, len(ids) // size) * size
    head = page_digests(tokens(*ids[:cut]), size, KEY)
    tail = page_digests(tokens(*ids[cut:]), size, KEY, head[-DIGEST_BYTES:])
    assert head + tail == page_digests(tokens(*ids), size, KEY)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.integers(1, 5))
def test_a_block_gives_back_what_was_written(ids: list[int], size: int) -> None:
    digests = page_digests(tokens(*ids), size, KEY)
    hashes = len(digests) // DIGEST_BYTES
    block = bytearray(block_bytes(len(ids), hashes))
    write_prompt(memoryview(block), tokens(*ids), digests)
    found = read_prompt(memoryview(block), len(ids), hashes)
    assert found.tokens.tolist() == ids
    assert found.digests == digests
    if hashes:
        assert digests_at(len(ids)) % 8 == 0


def test_a_prompt_without_digests_takes_its_tokens_only() -> None:
    assert block_bytes(5, 0) == 20
    assert block_bytes(5, 1) == 24 + DIGEST_BYTES


def test_a_block_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="smaller than requested"):
        read_prompt(bytes(40), 5, 2)
