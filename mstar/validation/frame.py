"""Frames of the native protocol: msgpack maps, decoded in pieces where they are large.

A small frame is one call of the decoder. A large one is walked here, object by object, so that no call holds
the interpreter for long; what large frames consist of, token ids, goes by pieces of thousands at a time.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from mstar.validation.body import MAX_DEPTH, MAX_ITEMS, PIECE
from mstar.validation.errors import RequestInvalid

__all__ = ["decode_frame"]

_RUN = 1 << 14
# One non-negative integer below 2**32: fixint, uint8, uint16 or uint32. Possessive: no way back is kept.
_TOKEN = rb"(?s:[\x00-\x7f]|\xcc.|\xcd..|\xce....)"
_tokens: msgspec.msgpack.Decoder[list[int]] = msgspec.msgpack.Decoder(list[int])
_BIG = {0xCC: "B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: "b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_NUMBERS = {code: struct.Struct(form) for code, form in {**_BIG, 0xCA: ">f", 0xCB: ">d"}.items()}
_LENGTHS = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def decode_frame(frame: bytes) -> dict[str, Any]:
    """Decode a msgpack map of names. A large list of token ids comes as an int64 array.

    Raises RequestInvalid where the frame is not valid msgpack, holds binary or extension values, nests
    deeper than MAX_DEPTH, or where a large one has a list or map of more than MAX_ITEMS members.
    """
    try:
        value = msgspec.msgpack.decode(frame) if len(frame) <= PIECE else _Walk(frame).whole()
    except (msgspec.DecodeError, struct.error, IndexError, UnicodeDecodeError) as error:
        raise _malformed(str(error)) from error
    except RecursionError as error:
        raise _malformed(f"more than {MAX_DEPTH} levels") from error
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise _malformed("no map of names")
    return value


def _malformed(why: str) -> RequestInvalid:
    return RequestInvalid(f"The frame is not a valid request: {why}.", code="invalid_frame")


class _Walk:
    def __init__(self, frame: bytes) -> None:
        self._frame = frame
        self._at = 0

    def whole(self) -> Any:
        value = self._value(0)
        if self._at != len(self._frame):
            raise _malformed(f"{len(self._frame) - self._at} bytes follow its end")
        return value

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _malformed(f"more than {MAX_DEPTH} levels")
        code = self._frame[self._at]
        self._at += 1
        if code <= 0x7F:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code <= 0x8F:
            return self._map(code & 0x0F, depth)
        if code <= 0x9F:
            return self._list(code & 0x0F, depth)
        if code <= 0xBF:
            return self._text(code & 0x1F)
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            form = _NUMBERS[code]
            (number,) = form.unpack_from(self._frame, self._at)
            self._at += form.size
            return number
        if code not in _LENGTHS:
            raise _malformed("binary and extension values are not allowed")
        size = int.from_bytes(self._take(_LENGTHS[code]), "big")
        if code <= 0xDB:
            return self._text(size)
        return self._list(size, depth) if code <= 0xDD else self._map(size, depth)

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._frame):
            raise _malformed("it ends too early")
        taken, self._at = self._frame[self._at : end], end
        return taken

    def _text(self, size: int) -> str:
        return self._take(size).decode("utf-8")

    def _map(self, size: int, depth: int) -> dict[Any, Any]:
        self._check(size)
        found: dict[Any, Any] = {}
        for _ in range(size):
            name = self._value(depth + 1)
            if not isinstance(name, str | int | float | None):
                raise _malformed("a name is a list or a map")
            found[name] = self._value(depth + 1)
        return found

    def _list(self, size: int, depth: int) -> list[Any] | NDArray[np.int64]:
        if size > _RUN:
            tokens = self._run(size)
            if tokens is not None:
                return tokens
        self._check(size)
        return [self._value(depth + 1) for _ in range(size)]

    def _run(self, size: int) -> NDArray[np.int64] | None:
        """A list of token ids alone, a piece at a time; None, and no step further, where it is another."""
        start, pieces = self._at, []
        while size:
            count = min(size, _RUN)
            found = re.compile(rb"%b{%d}+" % (_TOKEN, count)).match(self._frame, self._at)
            if found is None:
                self._at = start
                return None
            pieces.append(
                np.array(_tokens.decode(b"\xdc%b%b" % (count.to_bytes(2, "big"), found[0])), np.int64)
            )
            self._at = found.end()
            size -= count
        return np.concatenate(pieces)

    def _check(self, size: int) -> None:
        if size > MAX_ITEMS:
            raise RequestInvalid(
                f"A list or map in the frame has {size} members; at most {MAX_ITEMS} are allowed.",
                code="invalid_frame",
            )
