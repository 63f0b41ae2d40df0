"""The native protocol's bytes: a preface, then frames of a u32 little-endian length and a msgpack map."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar.client.errors import BadRequest, ProtocolError

__all__ = ["PREFACE", "FrameReader", "frame"]

PREFACE = b"MSTAR\x01\r\n"
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, Any])


def frame(message: dict[str, Any]) -> bytes:
    """``message`` as one frame. Raises BadRequest for a value that msgpack cannot carry."""
    try:
        payload = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequest(f"the request cannot be sent: {error}") from error
    return len(payload).to_bytes(4, "little") + payload


class FrameReader:
    """Cuts a byte stream into messages. A frame longer than ``limit`` bytes raises ProtocolError."""

    def __init__(self, limit: int = 64 << 20) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], int]]:
        """The messages that ``data`` completes, each with its length in bytes."""
        buffer = self._buffer
        buffer += data
        found: list[tuple[dict[str, Any], int]] = []
        start = 0
        while len(buffer) - start >= 4:
            length = int.from_bytes(buffer[start : start + 4], "little")
            if length > self._limit:
                raise ProtocolError(
                    f"the server sent a frame of {length} bytes; at most {self._limit} are allowed"
                )
            end = start + 4 + length
            if len(buffer) < end:
                break
            try:
                found.append((_decoder.decode(memoryview(buffer)[start + 4 : end]), length))
            except msgspec.DecodeError as error:
                raise ProtocolError(f"the server sent a frame that is not a msgpack map: {error}") from error
            start = end
        del buffer[:start]
        return found
