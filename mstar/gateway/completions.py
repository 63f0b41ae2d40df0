"""The shapes of /v1/completions: chunks of a stream and the whole answer, as bytes."""

from __future__ import annotations

import msgspec

from mstar.gateway.envelope import Envelope, EventChunks
from mstar.gateway.jsontext import json_text
from mstar.gateway.logprobs import CompletionScores
from mstar.gateway.request import Delta, Request

__all__ = ["CompletionChunks", "completion_answer"]

KIND = "text_completion"


class CompletionChunks(EventChunks):
    """Server-sent events of one completion stream."""

    def __init__(self, envelope: Envelope, *, usage: bool) -> None:
        super().__init__(envelope, KIND, usage=usage)

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
