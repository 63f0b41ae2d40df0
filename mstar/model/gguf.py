"""Reading GGUF files: metadata, tensor table, dense values. Knows nothing of architectures.

The format is that of ggml's published specification (version 2 and 3, little endian). The metadata is read
here because the gguf library's reader makes an object per list element: 2.9 s for a 49k vocabulary against
0.1 s; the tensors' block formats are dequantised by the library.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mstar.model.errors import BadModelFiles, UnsupportedModel

__all__ = ["GGUF", "GGUFTensor", "Value"]

Value = int | float | bool | str | list[str] | npt.NDArray[np.generic]

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_F32, _F16 = 0, 1


class GGUFTensor(NamedTuple):
    """One row of the tensor table; `shape` is row-major (the file's order reversed), `type` ggml's number."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class GGUF:
    """A mapped GGUF file.

    Raises BadModelFiles where the file is not GGUF, is cut short or lies about its sizes; UnsupportedModel
    for versions and element types that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size < 24:
            raise BadModelFiles(f"{path.name} is not a GGUF file: it has {path.stat().st_size} bytes.")
        self._data: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        self._buffer = memoryview(self._data.data)
        self._at = 0
        if bytes(self._buffer[:4]) != b"GGUF":
            raise BadModelFiles(
                f"{path.name} is not a GGUF file: it starts with {bytes(self._buffer[:4])!r}, not b'GGUF'."
            )
        self._at = 4
        version = self._unsigned(4)
        if version not in (2, 3):
            raise UnsupportedModel(f"{path.name} has GGUF version {version}; versions 2 and 3 can be read.")
        tensors, pairs = self._unsigned(8), self._unsigned(8)
        self.metadata: dict[str, Value] = {}
        for _ in range(self._count(pairs, 13)):
            key = self._string()
            self.metadata[key] = self._value(self._unsigned(4))
        self.tensors = {t.name: t for t in [self._tensor() for _ in range(self._count(tensors, 24))]}
        alignment = self.integer("general.alignment", 32)
        self._base = -(-self._at // alignment) * alignment

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of the metadata; BadModelFiles where it is missing without a default, or something
        else."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadModelFiles(f"{self.path.name}: {key} is {value!r}; an integer is needed.")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number of the metadata as a float; BadModelFiles as in `integer`."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadModelFiles(f"{self.path.name}: {key} is {value!r}; a number is needed.")
        return float(value)

    def strings(self, key: str) -> list[str]:
        """A list of strings of the metadata; BadModelFiles as in `integer`."""
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise BadModelFiles(
                f"{self.path.name}: {key} is {type(value).__name__}; a list of strings is needed."
            )
        return value

    def nbytes(self, tensor: GGUFTensor) -> int:
        """Bytes that `tensor` takes once dense: float16 stays, everything else becomes float32."""
        return int(np.prod(tensor.shape, dtype=np.int64)) * (2 if tensor.type == _F16 else 4)

    def dense(self, name: str) -> npt.NDArray[np.floating]:
        """Tensor `name` as float16 (where stored so) or float32, of its row-major shape; a fresh array."""
        tensor = self.tensors[name]
        if tensor.type in (_F32, _F16):
            dtype = np.dtype("<f4" if tensor.type == _F32 else "<f2")
            count = int(np.prod(tensor.shape, dtype=np.int64))
            return self._bytes(tensor, count * dtype.itemsize).view(dtype).reshape(tensor.shape).copy()
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        try:
            kind = GGMLQuantizationType(tensor.type)
            elements, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise UnsupportedModel(
                f"{self.path.name}: tensor {name} has the unknown ggml type {tensor.type}."
            ) from None
        *rows, columns = tensor.shape
        if columns % elements:
            raise BadModelFiles(
                f"{self.path.name}: tensor {name} has rows of {columns}; "
                f"{kind.name} needs multiples of {elements}."
            )
        width = columns // elements * size
        packed = self._bytes(tensor, int(np.prod(rows, dtype=np.int64)) * width).reshape(*rows, width)
        try:
            return np.ascontiguousarray(dequantize(packed, kind), dtype=np.float32)
        except NotImplementedError:
            raise UnsupportedModel(
                f"{self.path.name}: tensor {name} is {kind.name}, which cannot be dequantised."
            ) from None

    def _bytes(self, tensor: GGUFTensor, nbytes: int) -> npt.NDArray[np.uint8]:
        start = self._base + tensor.offset
        if start + nbytes > len(self._data):
            raise BadModelFiles(
                f"{self.path.name} is cut short: tensor {tensor.name} ends at byte {start + nbytes}, "
                f"the file at {len(self._data)}."
            )
        return self._data[start : start + nbytes]

    def _take(self, nbytes: int) -> memoryview:
        end = self._at + nbytes
        if end > len(self._buffer):
            raise BadModelFiles(
                f"{self.path.name} is cut short: its header needs byte {end} of {len(self._buffer)}."
            )
        view = self._buffer[self._at : end]
        self._at = end
        return view

    def _count(self, claimed: int, least: int) -> int:
        if claimed * least > len(self._buffer):
            raise BadModelFiles(
                f"{self.path.name} claims {claimed} entries, more than its {len(self._buffer)} bytes hold."
            )
        return claimed

    def _unsigned(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _string(self) -> str:
        return str(self._take(self._unsigned(8)), "utf-8", "replace")

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        scalar = self._array_of(kind, 1)[0].item()
        if not isinstance(scalar, int | float | bool):
            raise BadModelFiles(f"{self.path.name}: a metadata value reads as {scalar!r}.")
        return scalar

    def _array(self) -> Value:
        kind, count = self._unsigned(4), self._unsigned(8)
        if kind != _STRING:
            return self._array_of(kind, count)
        self._count(count, 8)
        texts, buffer, at, end = [], self._buffer, self._at, len(self._buffer)
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                break
            size = length(buffer, at)[0]
            at += 8 + size
            if at > end:
                break
            texts.append(str(buffer[at - size : at], "utf-8", "replace"))
        if len(texts) != count:
            raise BadModelFiles(f"{self.path.name} is cut short inside a list of {count} strings.")
        self._at = at
        return texts

    def _array_of(self, kind: int, count: int) -> npt.NDArray[np.generic]:
        if kind not in _SCALARS:
            raise UnsupportedModel(f"{self.path.name} holds a metadata value of the unknown type {kind}.")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)

    def _tensor(self) -> GGUFTensor:
        name, dimensions = self._string(), self._unsigned(4)
        if dimensions > 4:
            raise BadModelFiles(
                f"{self.path.name}: tensor {name} claims {dimensions} dimensions; 4 are the most."
            )
        shape = tuple(reversed([self._unsigned(8) for _ in range(dimensions)]))
        return GGUFTensor(name, shape, self._unsigned(4), self._unsigned(8))
