"""Columnar frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.codec import Table
from shm.errors import ColumnMismatch

SCHEMA = {"request": "int64", "index": "int32", "flag": "bool", "token": "int32", "logprob": "float16"}
TABLE = Table("tokens", SCHEMA)


def columns(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    return {name: (np.arange(rows) % 7).astype(dtype) for name, dtype in SCHEMA.items()}


@given(st.integers(0, 300))
def test_what_was_encoded_is_decoded(rows: int) -> None:
    given_columns = columns(rows)
    decoded = TABLE.decode(TABLE.encode(given_columns))
    assert sorted(decoded) == sorted(SCHEMA)
    for name, column in decoded.items():
        assert column.dtype == SCHEMA[name]
        assert column.shape == (rows,)
        assert np.array_equal(column, given_columns[name])


def test_columns_are_views_of_the_frame_and_aligned() -> None:
    frame = bytearray(TABLE.encode(columns(5)))
    base = np.frombuffer(frame, np.uint8).ctypes.data
    for column in TABLE.decode(frame).values():
        assert base <= column.ctypes.data < base + len(frame)
        assert (column.ctypes.data - base) % 8 == 0


def test_the_parts_are_the_frame_and_columns_are_not_copied() -> None:
    given_columns = columns(4)
    parts: list[Any] = list(TABLE.parts(given_columns))
    assert b"".join(parts) == TABLE.encode(given_columns)
    assert any(part is given_columns["request"] for part in parts)


def test_strided_columns_are_encoded_all_the_same() -> None:
    given_columns = columns(5)
    given_columns["token"] = np.arange(10, dtype=np.int32)[::2]
    assert TABLE.decode(TABLE.encode(given_columns))["token"].tolist() == [0, 2, 4, 6, 8]


def test_columns_of_different_length_are_refused() -> None:
    given_columns = columns(5)
    given_columns["token"] = given_columns["token"][:4]
    with pytest.raises(ColumnMismatch, match=r"'token'.*\(4,\).*\(5,\)"):
        TABLE.encode(given_columns)


@pytest.mark.parametrize(
    ("name", "column", "what"),
    [
        ("index", np.zeros(5, np.int64), "int64, expected int32"),
        ("index", np.zeros((5, 1), np.int32), "shape"),
        ("request", np.zeros((5, 1), np.int64), "one dimension"),
    ],
)
def test_a_column_of_another_type_or_shape_is_refused(
    name: str, column: np.ndarray[Any, Any], what: str
) -> None:
    with pytest.raises(ColumnMismatch, match=what):
        TABLE.encode({**columns(5), name: column})


def test_missing_and_unknown_columns_are_refused() -> None:
    missing = columns(5)
    del missing["flag"]
    with pytest.raises(ColumnMismatch, match="expected exactly"):
        TABLE.encode(missing)
    with pytest.raises(ColumnMismatch, match="expected exactly"):
        TABLE.encode({**missing, "other": np.zeros(5, bool)})
    with pytest.raises(ColumnMismatch, match="expected exactly"):
        TABLE.encode({**columns(5), "other": np.zeros(5, bool)})


@pytest.mark.parametrize("cut", [1, 8, 16])
def test_a_frame_that_is_too_short_or_too_long_is_refused(cut: int) -> None:
    frame = TABLE.encode(columns(6))
    with pytest.raises(ColumnMismatch, match="claims 6 rows"):
        TABLE.decode(frame[:-cut])
    with pytest.raises(ColumnMismatch, match="claims 6 rows"):
        TABLE.decode(frame + bytes(cut))


def test_a_stub_of_a_frame_is_refused() -> None:
    with pytest.raises(ColumnMismatch, match="too short"):
        TABLE.decode(b"")
    with pytest.raises(ColumnMismatch, match="too short"):
        TABLE.decode(bytes(15))


@pytest.mark.parametrize("rows", [5, 7, 2**40, 2**64 - 1])
def test_a_wrong_row_count_is_refused(rows: int) -> None:
    frame = bytearray(TABLE.encode(columns(14)))
    frame[8:16] = rows.to_bytes(8, "little")
    with pytest.raises(ColumnMismatch, match=f"claims {rows} rows"):
        TABLE.decode(frame)


@pytest.mark.parametrize(
    "other",
    [
        Table("other", SCHEMA),
        Table("tokens", {**SCHEMA, "token": "uint32"}),
        Table("tokens", dict(reversed(SCHEMA.items()))),
    ],
)
def test_a_frame_of_another_schema_is_refused(other: Table) -> None:
    with pytest.raises(ColumnMismatch, match="schema hash"):
        other.decode(TABLE.encode(columns(4)))


@pytest.mark.parametrize("dtype", ["object", "U4", ">i4", "datetime64[s]", "complex128", "V8"])
def test_types_that_are_no_plain_numbers_are_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match="native numbers"):
        Table("t", {"a": dtype})


def test_a_table_without_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="no columns"):
        Table("t", {})
