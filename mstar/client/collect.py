"""From chunks to a whole answer; no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from mstar.client.types import Choice, Chunk, TokenLogprob, Usage

__all__ = ["Collector"]


class _Open:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None


class Collector:
    """Takes the chunks of one request and gives its choices and usage."""

    def __init__(self) -> None:
        self._choices: dict[int, _Open] = {}
        self.usage = Usage()

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Take more chunks, in the order they came."""
        for chunk in chunks:
            if chunk.usage is not None:
                self.usage = chunk.usage
            if chunk.choice < 0:
                continue
            choice = self._choices.setdefault(chunk.choice, _Open())
            choice.texts.append(chunk.text)
            choice.tokens.extend(chunk.tokens)
            choice.logprobs.extend(chunk.logprobs)
            choice.finish_reason = chunk.finish_reason or choice.finish_reason

    def choices(self) -> tuple[Choice, ...]:
        """The choices so far, by index."""
        return tuple(
            Choice(
                index=index,
                text="".join(choice.texts),
                tokens=tuple(choice.tokens),
                logprobs=tuple(choice.logprobs),
                finish_reason=choice.finish_reason,
            )
            for index, choice in sorted(self._choices.items())
        )
