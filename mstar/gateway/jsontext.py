"""Text as a JSON string that is safe inside a line of an event stream."""

from __future__ import annotations

import msgspec

__all__ = ["json_text"]

_encode = msgspec.json.encode
# Line ends to str.splitlines, which some clients cut event streams with, but plain text to JSON.
_LINES = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def json_text(text: str) -> bytes:
    """``text`` as a JSON string, UTF-8, without any character that a client could take for a line's end."""
    encoded = _encode(text)
    if text.isascii():
        return encoded
    for plain, escaped in _LINES:
        if plain in encoded:
            encoded = encoded.replace(plain, escaped)
    return encoded
