"""Columnar frames: several columns, one row count.

A frame is two u64 (hash of the schema, number of rows) and the columns, those of one dtype next to each other
in the order of the schema, each padded to 8 bytes. It says nothing that the schema does not; a frame of
another table, another count or another length does not decode.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shm.errors import ColumnMismatch

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Table"]

_HEADER = struct.Struct("=QQ")
_PADS = tuple(bytes(n) for n in range(8))


class _Group(NamedTuple):
    dtype: np.dtype[Any]
    names: tuple[str, ...]
    columns: int
    itemsize: int


class Table:
    """A named schema: column name to dtype (fixed width, 1 to 8 bytes a value), in order."""

    def __init__(self, name: str, columns: Mapping[str, str]) -> None:
        self.name = name
        self.columns = {column: np.dtype(dtype) for column, dtype in columns.items()}
        if not self.columns:
            raise ValueError(f"table {name!r} has no columns: give it one at least")
        groups: dict[np.dtype[Any], list[str]] = {}
        for column, dtype in self.columns.items():
            if dtype.kind not in "biufc" or dtype.itemsize > 8 or not dtype.isnative:
                raise ValueError(
                    f"column {column!r} of table {name!r} is {dtype}: "
                    "allowed are native numbers of 1 to 8 bytes"
                )
            groups.setdefault(dtype, []).append(column)
        self._groups = tuple(
            _Group(dtype, tuple(names), len(names), dtype.itemsize) for dtype, names in groups.items()
        )
        self._order = tuple(
            (column, dtype) for group in self._groups for dtype in (group.dtype,) for column in group.names
        )
        text = repr((name, [(column, str(dtype)) for column, dtype in self.columns.items()]))
        self._hash = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def encode(self, columns: Mapping[str, NDArray[Any]]) -> bytes:
        """One frame of 1-D columns of the schema's dtypes. Raises ColumnMismatch."""
        return b"".join(self.parts(columns))

    def parts(self, columns: Mapping[str, NDArray[Any]]) -> list[Buffer]:
        """The frame in pieces, columns not copied unless they are strided. Raises ColumnMismatch."""
        if len(columns) != len(self._order):
            raise self._wrong_columns(columns)
        parts: list[Any] = [b""]
        shape: tuple[int, ...] | None = None
        for name, dtype in self._order:
            try:
                column = columns[name]
            except KeyError:
                raise self._wrong_columns(columns) from None
            if column.dtype is not dtype and column.dtype != dtype:
                raise ColumnMismatch(
                    f"column {name!r} of table {self.name!r} is {column.dtype}, expected {dtype}"
                )
            if column.shape != shape:
                if shape is not None or column.ndim != 1:
                    raise ColumnMismatch(
                        f"column {name!r} of table {self.name!r} has shape {column.shape}, expected "
                        f"{shape or 'one dimension'}: give all columns one length"
                    )
                shape = column.shape
            parts.append(column if column.flags.c_contiguous else np.ascontiguousarray(column))
            pad = -column.nbytes & 7
            if pad:
                parts.append(_PADS[pad])
        parts[0] = _HEADER.pack(self._hash, 0 if shape is None else shape[0])
        return parts

    def decode(self, frame: Buffer) -> dict[str, NDArray[Any]]:
        """Columns by name as views of the frame, valid as long as it is. Raises ColumnMismatch."""
        view = memoryview(frame)
        nbytes = view.nbytes
        if nbytes < 16:
            raise ColumnMismatch(f"a frame of {nbytes} bytes is too short for table {self.name!r}")
        found, rows = _HEADER.unpack_from(view)
        if found != self._hash:
            raise ColumnMismatch(
                f"the frame's schema hash is {found:#x}, table {self.name!r} has {self._hash:#x}: "
                "both sides need one schema"
            )
        columns: dict[str, NDArray[Any]] = {}
        at = 16
        for dtype, names, count, itemsize in self._groups:
            stride = (rows * itemsize + 7) & -8
            end = at + stride * count
            if end > nbytes:
                raise self._wrong_length(nbytes, rows)
            block = np.ndarray((count, rows), dtype, view, at, (stride, itemsize))
            # strict would cost 1 us: an array ends by IndexError
            columns.update(zip(names, block, strict=False))
            at = end
        if at != nbytes:
            raise self._wrong_length(nbytes, rows)
        return columns

    def _wrong_length(self, nbytes: int, rows: int) -> ColumnMismatch:
        size = 16 + sum(count * ((rows * itemsize + 7) & -8) for _, _, count, itemsize in self._groups)
        return ColumnMismatch(
            f"a frame of {nbytes} bytes claims {rows} rows of table {self.name!r}, which take {size}"
        )

    def _wrong_columns(self, columns: Mapping[str, NDArray[Any]]) -> ColumnMismatch:
        return ColumnMismatch(
            f"table {self.name!r} got columns {sorted(columns)}, expected exactly {sorted(self.columns)}"
        )
