"""Log-probabilities in the two forms of OpenAI's API, rendered to JSON as they arrive.

Rendered token by token, a long answer with twenty alternatives a token costs nothing extra at its end. What
names a token (its text and bytes) is rendered once per token id and kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from mstar.gateway.text import Vocabulary

__all__ = ["ChatScores", "CompletionScore", "CompletionScores", "NativeScores"]

LEAST = -9999.0  # OpenAI's stand-in for a probability of zero, which JSON cannot write
_encode = msgspec.json.encode


def finite(value: float) -> float:
    """A log-probability as JSON can carry it."""
    return value if math.isfinite(value) and value > LEAST else LEAST


class ChatScores:
    """The chat format: an object per token, as bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._names: dict[int, bytes] = {}

    def render(self, token: int, logprob: float, ids: list[int], values: list[float], place: int) -> bytes:
        """The entry of one generated token and its alternatives."""
        tops = b",".join(
            [
                b"%b%b}" % (self._name(id), b"%.6f" % finite(value))
                for id, value in zip(ids, values, strict=True)
            ]
        )
        return b'%b%.6f,"top_logprobs":[%b]}' % (self._name(token), finite(logprob), tops)

    def _name(self, token: int) -> bytes:
        found = self._names.get(token)
        if found is None:
            text, raw = self._vocabulary.show(token)
            numbers = b"null" if raw is None else b"[%b]" % b",".join([b"%d" % byte for byte in raw])
            found = self._names[token] = b'{"token":%b,"bytes":%b,"logprob":' % (_encode(text), numbers)
        return found

    @staticmethod
    def join(entries: Iterable[bytes]) -> bytes:
        """A choice's `logprobs` object."""
        return b'{"content":[%b],"refusal":null}' % b",".join(entries)


class CompletionScore(NamedTuple):
    """One token's part of the four columns, each as JSON."""

    token: bytes
    logprob: bytes
    top: bytes
    offset: bytes


class CompletionScores:
    """The format of the older endpoint: four columns of one length.

    A token that is no text by itself is named by its bytes. ``top_logprobs`` holds the alternatives and
    the token itself.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._names: dict[int, bytes] = {}

    def render(
        self, token: int, logprob: float, ids: list[int], values: list[float], place: int
    ) -> CompletionScore:
        """The entry of one generated token; ``place`` is where its text begins in the completion."""
        tops = {self._name(id): value for id, value in zip(ids, values, strict=True)}
        name = self._name(token)
        tops.setdefault(name, logprob)
        body = b",".join([b"%b:%.6f" % (key, finite(value)) for key, value in tops.items()])
        return CompletionScore(name, b"%.6f" % finite(logprob), b"{%b}" % body, b"%d" % place)

    def _name(self, token: int) -> bytes:
        found = self._names.get(token)
        if found is None:
            text, raw = self._vocabulary.show(token)
            if raw is not None and "\ufffd" in text:
                text = "bytes:" + "".join([f"\\x{byte:02x}" for byte in raw])
            found = self._names[token] = _encode(text)
        return found

    @staticmethod
    def join(entries: Iterable[CompletionScore]) -> bytes:
        """A choice's `logprobs` object."""
        columns = list(zip(*entries, strict=True)) or [(), (), (), ()]
        tokens, logprobs, tops, offsets = (b",".join(column) for column in columns)
        return b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}' % (
            tokens,
            logprobs,
            tops,
            offsets,
        )


class NativeScores:
    """The native protocol's form: the chat format as plain objects, with token ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def render(
        self, token: int, logprob: float, ids: list[int], values: list[float], place: int
    ) -> dict[str, Any]:
        """The entry of one generated token and its alternatives."""
        entry = self._entry(token, logprob)
        entry["top_logprobs"] = [self._entry(id, value) for id, value in zip(ids, values, strict=True)]
        return entry

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._vocabulary.show(token)
        bytes_ = None if raw is None else list(raw)
        return {"token": text, "token_id": token, "logprob": finite(logprob), "bytes": bytes_}
