"""Byte counts with units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.config.size import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("7", 7), ("1KiB", 1024), ("1kb", 1000), ("1.5 GiB", 3 << 29), ("2TB", 2 * 10**12), ("3B", 3)],
)
def test_units_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "1G", "1 GiB x", "GiB", "1e9"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        parse_size(text)


@given(st.integers(0, 1 << 50))
def test_what_is_shown_can_be_given(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes
