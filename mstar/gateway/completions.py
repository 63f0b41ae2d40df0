"""The shapes of /v1/completions: chunks of a stream and the whole answer, as bytes."""

from __future__ import annotations

import msgspec

from mstar.gateway.chat import Envelope
from mstar.gateway.jsontext import json_text
from mstar.gateway.logprobs import CompletionScores
from mstar.gateway.request import Delta, Request

__all__ = ["CompletionChunks", "completion_answer"]

KIND = "text_completion"


class CompletionChunks:
    """Server-sent events of one completion stream. ``usage``: the client asked for the usage chunk."""

    def __init__(self, envelope: Envelope, *, usage: bool) -> None:
        self._head = b"data: " + envelope.head(KIND) + b'"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._usage = usage

    def delta(self, index: int, delta: Delta) -> bytes:
        """The event for what a choice gained; its finish reason comes with the last one."""
        if not (delta.text or delta.scores or delta.reason):
            return b""
        return b'%b{"text":%b,"index":%d,"logprobs":%b,"finish_reason":%b}%b' % (
            self._head,
            json_text(delta.text),
            index,
            CompletionScores.join(delta.scores) if delta.scores else b"null",
            b"null" if delta.reason is None else b'"%b"' % delta.reason.encode(),
            self._tail,
        )

    def end(self, request: Request) -> bytes:
        """The usage chunk where it was asked for, and the end of the stream."""
        if not self._usage:
            return b"data: [DONE]\n\n"
        usage = msgspec.json.encode(request.usage.object())
        return b'%b],"usage":%b}\n\ndata: [DONE]\n\n' % (self._head, usage)


def completion_answer(envelope: Envelope, request: Request, *, scored: bool) -> bytes:
    """The whole answer of a request that is done."""
    choices = []
    for choice in request.choices:
        delta = choice.take()
        choices.append(
            b'{"text":%b,"index":%d,"logprobs":%b,"finish_reason":"%b"}'
            % (
                json_text(delta.text),
                choice.index,
                CompletionScores.join(delta.scores) if scored else b"null",
                (delta.reason or "stop").encode(),
            )
        )
    usage = msgspec.json.encode(request.usage.object())
    return b'%b"choices":[%b],"usage":%b}' % (envelope.head(KIND), b",".join(choices), usage)
