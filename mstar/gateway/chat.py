"""The shapes of /v1/chat/completions: chunks of a stream and the whole answer, as bytes.

What does not change within a stream is rendered once, so a chunk is a join of few pieces.
"""

from __future__ import annotations

import msgspec

from mstar.gateway.envelope import Envelope, EventChunks
from mstar.gateway.jsontext import json_text
from mstar.gateway.logprobs import ChatScores
from mstar.gateway.request import Delta, Request

__all__ = ["ChatChunks", "chat_answer"]


class ChatChunks(EventChunks):
    """Server-sent events of one chat stream."""

    def __init__(self, envelope: Envelope, *, usage: bool) -> None:
        super().__init__(envelope, "chat.completion.chunk", usage=usage)
        self._prefix: dict[int, bytes] = {}

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events for what a choice gained: its role first, its finish reason last."""
        events = b""
        prefix = self._prefix.get(index)
        if prefix is None:
            prefix = self._prefix[index] = b'%b{"index":%d,"delta":{"content":' % (self._head, index)
            events = self._event(index, b'{"role":"assistant","content":"","refusal":null}', b"null")
        if delta.scores:
            scores = ChatScores.join(delta.scores)
            events += b'%b%b},"logprobs":%b,"finish_reason":null}%b' % (
                prefix,
                json_text(delta.text),
                scores,
                self._tail,
            )
        elif delta.text:
            events += b'%b%b},"logprobs":null,"finish_reason":null}%b' % (
                prefix,
                json_text(delta.text),
                self._tail,
            )
        if delta.reason is not None:
            events += self._event(index, b"{}", b'"%b"' % delta.reason.encode())
        return events

    def _event(self, index: int, delta: bytes, reason: bytes) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b}%b' % (
            self._head,
            index,
            delta,
            reason,
            self._tail,
        )


def chat_answer(envelope: Envelope, request: Request, *, scored: bool) -> bytes:
    """The whole answer of a request that is done."""
    choices = []
    for choice in request.choices:
        delta = choice.take()
        choices.append(
            b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null},'
            b'"logprobs":%b,"finish_reason":"%b"}'
            % (
                choice.index,
                json_text(delta.text),
                ChatScores.join(delta.scores) if scored else b"null",
                (delta.reason or "stop").encode(),
            )
        )
    usage = msgspec.json.encode(request.usage.object())
    return b'%b"choices":[%b],"usage":%b}' % (envelope.head("chat.completion"), b",".join(choices), usage)
