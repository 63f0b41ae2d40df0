"""One accepted request and its sequences: what has come, what may leave, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mstar.gateway.errors import ApiError
from mstar.gateway.text import TextStream

__all__ = ["CANCELLED", "DONE", "FAILED", "Choice", "Delta", "Render", "Request", "Sink", "Usage"]

DONE, FAILED, CANCELLED = "done", "failed", "cancelled"

Render = Callable[[int, float, list[int], list[float], int], Any]
"""Log-probabilities of a token -> what its format keeps: token, logprob, alternatives, place in the text."""


class Sink(Protocol):
    """Where a request's deltas go; told that something changed, it takes what it can."""

    def flush(self, request: Request) -> None: ...


class Usage(NamedTuple):
    """Tokens of a request: the prompts once each, and the generated ones of all choices."""

    prompt_tokens: int
    completion_tokens: int

    def object(self) -> dict[str, int]:
        """The usage as OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Delta(NamedTuple):
    """What one choice gained since it was last asked. ``reason`` is set once, on the last delta."""

    text: str
    tokens: list[int]
    scores: list[Any]
    reason: str | None


class Choice:
    """One sequence. ``count`` is the number of its tokens so far, and the index that is due."""

    __slots__ = (
        "attempt",
        "count",
        "id",
        "index",
        "last",
        "max_tokens",
        "owner",
        "reason",
        "scores",
        "stream",
        "texts",
        "tokens",
        "told",
        "top",
        "waiting",
    )

    def __init__(self, id: int, index: int, stream: TextStream, *, max_tokens: int, top: int = -1) -> None:
        self.id = id
        self.index = index
        self.stream = stream
        self.max_tokens = max_tokens
        self.top = top
        self.attempt = 0
        self.count = 0
        self.reason: str | None = None
        self.told = False
        self.last = 0.0
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.scores: list[Any] = []
        self.waiting: list[tuple[int, Any]] = []
        self.owner: Request

    @property
    def changed(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self.texts or self.tokens or self.scores) or (self.reason is not None and not self.told)

    def take(self) -> Delta:
        """What is new, merged into one delta; forgets it."""
        delta = Delta("".join(self.texts), self.tokens, self.scores, None if self.told else self.reason)
        self.texts, self.tokens, self.scores = [], [], []
        self.told = self.reason is not None
        return delta


class Request:
    """One accepted request: its choices, its sink, and its end.

    ``native`` requests keep every token, the stop token included, and their log-probabilities go out with
    their tokens; others give log-probabilities with the text they belong to. ``outcome`` is set once.
    """

    __slots__ = (
        "choices",
        "decider",
        "failure",
        "first",
        "live",
        "native",
        "number",
        "outcome",
        "prompt_tokens",
        "render",
        "sink",
        "started",
        "touched",
    )

    def __init__(
        self,
        number: int,
        choices: list[Choice],
        sink: Sink,
        *,
        decider: int,
        prompt_tokens: int,
        started: float,
        native: bool = False,
        render: Render | None = None,
    ) -> None:
        self.number = number
        self.choices = choices
        self.sink = sink
        self.decider = decider
        self.prompt_tokens = prompt_tokens
        self.started = started
        self.native = native
        self.render = render
        self.first: float | None = None
        self.live = len(choices)
        self.outcome: str | None = None
        self.failure: ApiError | None = None
        self.touched = False
        for choice in choices:
            choice.owner = self

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(self.prompt_tokens, sum(choice.count for choice in self.choices))
