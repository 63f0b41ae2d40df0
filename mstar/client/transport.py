"""What both protocols offer the clients: answers that come in batches of chunks, and single questions."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from mstar.client.types import ChatChunk, Chunk, TextChunk

__all__ = ["CHUNKS", "Answer", "Kind", "Transport"]

Kind = Literal["chat", "completion"]
CHUNKS: dict[Kind, type[Chunk]] = {"chat": ChatChunk, "completion": TextChunk}


class Answer(Protocol):
    """One generation under way."""

    async def batch(self) -> list[Chunk]:
        """All chunks that have come, at least one; empty when the answer is complete. Raises ClientError."""

    def cancel(self) -> None:
        """Tell the server to stop, if it has not; nothing more is delivered. May be called at any time."""


class Transport(Protocol):
    """A way to a server."""

    async def generate(self, kind: Kind, body: dict[str, Any], *, stream: bool) -> Answer:
        """Send a request, whose chunks are wanted as they come if ``stream``. Raises ClientError."""

    async def ask(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer of "models", "status", "ready", "tokenize" or "detokenize"; raises ClientError."""

    async def close(self) -> None:
        """End every answer and the connection."""
