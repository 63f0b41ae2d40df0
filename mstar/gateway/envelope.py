"""What both generating endpoints share: what every object of an answer repeats, and the end of a stream."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from mstar.gateway.request import Request

__all__ = ["Envelope", "EventChunks"]


class Envelope(NamedTuple):
    """What every object of one answer repeats; ``created`` is in Unix seconds."""

    id: str
    created: int
    model: str
    fingerprint: str

    def head(self, kind: str) -> bytes:
        """The beginning of an object of this kind, up to its choices."""
        return b'{"id":%b,"object":"%b","created":%d,"model":%b,"system_fingerprint":%b,' % (
            msgspec.json.encode(self.id),
            kind.encode(),
            self.created,
            msgspec.json.encode(self.model),
            msgspec.json.encode(self.fingerprint),
        )


class EventChunks:
    """The events of one stream: what is around a chunk's choices, rendered once, and the last event.

    ``kind`` is OpenAI's name of the chunks; ``usage``: the client asked for the usage chunk.
    """

    def __init__(self, envelope: Envelope, kind: str, *, usage: bool) -> None:
        self._head = b"data: " + envelope.head(kind) + b'"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._usage = usage

    def end(self, request: Request) -> bytes:
        """The usage chunk where it was asked for, and the end of the stream."""
        if not self._usage:
            return b"data: [DONE]\n\n"
        usage = msgspec.json.encode(request.usage.object())
        return b'%b],"usage":%b}\n\ndata: [DONE]\n\n' % (self._head, usage)
