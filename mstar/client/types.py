"""What a client gives back: frozen records, the same over the native protocol and over HTTP."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "ChatChunk",
    "ChatResult",
    "Choice",
    "Chunk",
    "Model",
    "Result",
    "TextChunk",
    "TextResult",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
]


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative at a place: its text, the natural logarithm of its probability, its bytes."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """A generated token with its log-probability under the raw model, and the likeliest alternatives."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: those of the prompt, and the generated ones of all choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class Chunk(msgspec.Struct, frozen=True):
    """A piece of one choice as it was generated.

    ``tokens`` are the ids behind ``text`` (the native protocol only; empty over HTTP).
    ``finish_reason`` is set on a choice's last chunk: "stop" or "length". ``usage`` is set on the
    last chunk of the request, whose ``choice`` is -1 and whose text is empty.
    """

    choice: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None


class ChatChunk(Chunk, frozen=True):
    """A piece of an assistant's message."""


class TextChunk(Chunk, frozen=True):
    """A piece of a completion."""


class Choice(msgspec.Struct, frozen=True):
    """One whole answer; see Chunk for its fields. ``logprobs`` is empty unless they were asked for."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None


class Result(msgspec.Struct, frozen=True):
    """A whole answer: its choices in order of their index, and the usage of all of them."""

    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids of the first choice (the native protocol only; empty over HTTP)."""
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended: "stop" or "length"."""
        return self.choices[0].finish_reason


class ChatResult(Result, frozen=True):
    """The answer of a chat."""

    @property
    def message(self) -> dict[str, str]:
        """The first choice as a message that can be appended to the conversation."""
        return {"role": "assistant", "content": self.text}


class TextResult(Result, frozen=True):
    """The answer of a completion."""


class Model(msgspec.Struct, frozen=True):
    """A model that the server answers for. ``max_model_len`` is its window in tokens, where it is told."""

    id: str
    created: int = 0
    owned_by: str = ""
    max_model_len: int | None = None


def entries(raw: Any) -> tuple[TokenLogprob, ...]:
    """Log-probabilities out of a chat's ``content`` list, its wrapping object, or a completion's columns."""
    if not raw:
        return ()
    if isinstance(raw, dict) and "tokens" in raw:
        tops = raw.get("top_logprobs") or [None] * len(raw["tokens"])
        return tuple(
            TokenLogprob(
                token=token,
                logprob=logprob,
                top_logprobs=tuple(TopLogprob(text, value) for text, value in (top or {}).items()),
            )
            for token, logprob, top in zip(raw["tokens"], raw["token_logprobs"], tops, strict=True)
        )
    if isinstance(raw, dict):
        raw = raw.get("content") or []
    return msgspec.convert(raw, tuple[TokenLogprob, ...])
