"""JSON bodies, decoded in pieces so that no single C call holds the interpreter for long.

A body of megabytes is decoded on a thread, but a decoder keeps the interpreter lock for the whole of
one call and would stop the event loop all the same. So the structure of a large body is found first with
numpy, which releases the lock, and the text is then cut at its commas and decoded a piece at a time.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from mstar.validation.errors import RequestInvalid

__all__ = ["MAX_DEPTH", "MAX_ITEMS", "PIECE", "decode_body"]

PIECE = 1 << 16  # bytes decoded by one call; a value with more commas than MANY is cut to such pieces
MANY = 1 << 14
MAX_ITEMS = 1 << 16  # members of one large list or object; a list of integers has no bound but the body's
MAX_DEPTH = 64

_QUOTE, _BACKSLASH, _COMMA, _COLON = 0x22, 0x5C, 0x2C, 0x3A
_integers: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(list[int])


def decode_body(body: bytes) -> dict[str, Any]:
    """Decode a JSON object. A large list of integers comes as an int64 array, everything else as itself.

    Raises RequestInvalid where the body is not valid JSON (NaN and Infinity are not), nests deeper than
    MAX_DEPTH, holds a number that no float can hold, or is not an object.
    """
    try:
        value = _decode(body) if len(body) <= PIECE else _Large(body).value()
    except msgspec.DecodeError as error:
        raise RequestInvalid(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    except RecursionError as error:
        raise _too_deep() from error
    if not isinstance(value, dict):
        raise RequestInvalid(f"The body must be a JSON object, not {_describe(value)}.", code="invalid_json")
    return value


def _decode(text: bytes | memoryview) -> Any:
    return msgspec.json.decode(text)


def _too_deep() -> RequestInvalid:
    return RequestInvalid(
        f"The body nests too deeply; at most {MAX_DEPTH} levels are allowed.", code="invalid_json"
    )


def _malformed(at: int) -> RequestInvalid:
    return RequestInvalid(
        f"The body is not valid JSON: brackets or commas do not fit at byte {at}.", code="invalid_json"
    )


_Members = TypeVar("_Members", list[Any], list[int], dict[str, Any])


def _filled(members: _Members, at: int, commas: int) -> _Members:
    """A run beside a comma decodes to nothing where a member is missing."""
    if not members and commas:
        raise _malformed(at)
    return members


def _describe(value: object) -> str:
    if value is None:
        return "null"
    names = {"list": "a list", "ndarray": "a list", "str": "a string", "bool": "a boolean"}
    return names.get(type(value).__name__, "a number")


class _Large:
    """One large body and where its structure lies: commas and colons outside strings, with their depth."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._view = memoryview(body)
        data = np.frombuffer(body, np.uint8)
        marks = np.flatnonzero(_outside_strings(data) & _structural(data))
        kinds = data[marks]
        opens = (kinds == 0x5B) | (kinds == 0x7B)
        closes = (kinds == 0x5D) | (kinds == 0x7D)
        depth = np.cumsum(opens.astype(np.int32) - closes.astype(np.int32), dtype=np.int32)
        if len(depth) and int(depth.max()) > MAX_DEPTH:
            raise _too_deep()
        self._marks, self._kinds, self._depth = marks, kinds, depth

    def value(self) -> Any:
        return self._span(0, len(self._body), 1)

    def _span(self, start: int, end: int, depth: int) -> Any:
        """Decode body[start:end], one JSON value whose members lie at ``depth``."""
        low, high = np.searchsorted(self._marks, (start, end))
        if end - start <= PIECE or high - low <= MANY:
            return _decode(self._view[start:end])
        first = int(self._marks[low])
        if self._kinds[low] not in (0x5B, 0x7B) or self._depth[low] != depth:
            raise _malformed(first)
        inner = slice(low, high)
        at_depth = self._depth[inner] == depth
        commas = self._marks[inner][at_depth & (self._kinds[inner] == _COMMA)]
        last = int(self._marks[high - 1])
        brackets = (b"[", b"]") if self._kinds[low] == 0x5B else (b"{", b"}")
        ends = self._body[last : last + 1] == brackets[1] and not self._body[last + 1 : end].strip()
        starts = not self._body[start:first].strip()
        if not (ends and starts):
            raise _malformed(last)
        if brackets[0] == b"[":
            return self._list(first + 1, last, commas, depth)
        return self._object(first + 1, last, commas, depth)

    def _list(self, start: int, end: int, commas: NDArray[np.intp], depth: int) -> Any:
        runs = _runs(start, end, commas)
        if self._body[start : start + 64].lstrip()[:1] not in (b"[", b"{", b'"'):
            numbers = self._numbers(runs, len(commas))
            if numbers is not None:
                return numbers
        if len(commas) >= MAX_ITEMS:
            raise RequestInvalid(
                f"A list in the body has {len(commas) + 1} members; at most {MAX_ITEMS} are allowed.",
                code="invalid_json",
            )
        values: list[Any] = []
        for low, high in runs:
            if high - low > PIECE:
                values.append(self._span(low, high, depth + 1))
            else:
                values.extend(_filled(_decode(b"[%b]" % self._body[low:high]), low, len(commas)))
        return values

    def _numbers(self, runs: list[tuple[int, int]], commas: int) -> NDArray[np.int64] | None:
        try:
            return np.concatenate(
                [
                    np.array(_filled(_integers.decode(b"[%b]" % self._body[low:high]), low, commas), np.int64)
                    for low, high in runs
                ]
            )
        except (msgspec.ValidationError, OverflowError):
            return None

    def _object(self, start: int, end: int, commas: NDArray[np.intp], depth: int) -> dict[str, Any]:
        if len(commas) >= MAX_ITEMS:
            raise RequestInvalid(
                f"An object in the body has {len(commas) + 1} members; at most {MAX_ITEMS} are allowed.",
                code="invalid_json",
            )
        values: dict[str, Any] = {}
        for low, high in _runs(start, end, commas):
            colon = self._colon(low, high, depth) if high - low > PIECE else None
            if colon is None:
                values.update(_filled(_decode(b"{%b}" % self._body[low:high]), low, len(commas)))
            else:
                key = msgspec.json.decode(self._view[low:colon], type=str)
                values[key] = self._span(colon + 1, high, depth + 1)
        return values

    def _colon(self, start: int, end: int, depth: int) -> int | None:
        low, high = np.searchsorted(self._marks, (start, end))
        for at in range(low, min(high, low + 2)):
            if self._kinds[at] == _COLON and self._depth[at] == depth:
                return int(self._marks[at])
        return None


def _runs(start: int, end: int, commas: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Cut [start, end) at commas into runs of members of at most PIECE bytes, or of one larger member."""
    if not len(commas):
        return [(start, end)]
    runs: list[tuple[int, int]] = []
    at = start
    while at < end:
        if end - at <= PIECE:
            cut = end
        else:
            index = int(np.searchsorted(commas, at + PIECE, side="right")) - 1
            if index < 0 or commas[index] < at:
                index += 1  # the next member alone is larger than a piece
            cut = int(commas[index]) if index < len(commas) else end
        runs.append((at, cut))
        if cut == end:
            return runs
        at = cut + 1
    runs.append((at, end))  # a comma before the bracket: an empty member, which the decoder refuses
    return runs


def _structural(data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[[0x5B, 0x5D, 0x7B, 0x7D, _COMMA, _COLON]] = True
    return table[data]


def _outside_strings(data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """True where a byte lies outside every string; a quote after an odd run of backslashes is text."""
    quotes = np.flatnonzero(data == _QUOTE)
    slashes = data == _BACKSLASH
    if slashes.any():
        positions = np.arange(len(data), dtype=np.int32)
        last_other = np.maximum.accumulate(np.where(slashes, -1, positions))
        before = np.where(quotes > 0, quotes - 1 - last_other[np.maximum(quotes - 1, 0)], 0)
        quotes = quotes[before % 2 == 0]
    toggles = np.zeros(len(data), np.uint8)
    toggles[quotes] = 1
    inside: NDArray[np.bool_] = np.bitwise_xor.accumulate(toggles) == 0
    return inside
