"""The asynchronous client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, overload

import msgspec

from mstar.client.collect import Collector
from mstar.client.errors import NotReady, ServerUnreachable
from mstar.client.native import NativeTransport
from mstar.client.transport import Answer, Kind, Transport
from mstar.client.types import ChatChunk, ChatResult, Chunk, Model, TextChunk, TextResult
from mstar.config.paths import UntrustedFolder, check_private, default_socket

__all__ = ["AsyncClient", "AsyncStream", "Messages", "Prompt"]

Messages = str | Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int]
C = TypeVar("C", bound=Chunk)


class AsyncStream(Generic[C]):
    """The chunks of one answer, for ``async for``. Cancelled, or dropped unread, it ends the request."""

    def __init__(self, answer: Answer) -> None:
        self._over = False
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._chunks: list[Chunk] = []

    def __aiter__(self) -> AsyncStream[C]:
        return self

    async def __anext__(self) -> C:
        if not self._chunks:
            self._chunks = (await self.batch())[::-1]
        if not self._chunks:
            raise StopAsyncIteration
        return self._chunks.pop()  # type: ignore[return-value]

    async def batch(self) -> list[Chunk]:
        """All chunks that have come and were not read, waiting for at least one; empty at the end."""
        if self._over:
            return []
        try:
            chunks = await self._answer.batch()
        except BaseException:
            self.cancel()
            raise
        self._over = not chunks
        return chunks

    def cancel(self) -> None:
        """End the request on the server if it has not ended; the iteration ends."""
        if not self._over:
            self._over = True
            self._chunks = []
            self._answer.cancel()

    async def aclose(self) -> None:
        """The same as ``cancel``."""
        self.cancel()

    async def __aenter__(self) -> AsyncStream[C]:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # Garbage may be collected in any thread, and after the loop.
        if not self._over and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._answer.cancel)


def make_transport(
    target: str | os.PathLike[str] | None, api_key: str | None, timeout: float | None
) -> Transport:
    """The transport for ``target`` (see AsyncClient). Raises ServerUnreachable for an untrusted socket."""
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        from mstar.client.http import HttpTransport

        return HttpTransport(target, api_key, timeout)
    if target is None:
        path = default_socket(os.environ)
        try:
            check_private(path.parent)
        except FileNotFoundError:
            pass
        except UntrustedFolder as error:
            raise ServerUnreachable(f"the default socket is not to be trusted: {error}") from error
    else:
        path = Path(os.fspath(target).removeprefix("unix:"))
    return NativeTransport(path, timeout)


class AsyncClient:
    """A client of one server, for asyncio. Requests may run at the same time.

    ``target`` is a URL (http://host:port), the path of a Unix socket, or None for the default
    socket of a daemon of this user. ``timeout`` is how many seconds may pass without a piece of an
    answer before TimedOut is raised; None waits for ever. Every method raises a ClientError.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self._transport = make_transport(target, api_key, timeout)

    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[False] = False, **params: Any
    ) -> ChatResult: ...
    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[True], **params: Any
    ) -> AsyncStream[ChatChunk]: ...

    async def chat(
        self, messages: Messages, *, stream: bool = False, **params: Any
    ) -> ChatResult | AsyncStream[ChatChunk]:
        """Answer a conversation: a list of messages, or a text that stands for one user's message.

        ``params`` are the fields of the chat API (max_tokens, temperature, stop, n, ...).
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        chunks: AsyncStream[ChatChunk] = await self._start(
            "chat", {"messages": list(messages), **params}, stream
        )
        if stream:
            return chunks
        done = await self._collect(chunks)
        return ChatResult(done.choices(), done.usage)

    @overload
    async def generate(
        self, prompt: Prompt, *, stream: Literal[False] = False, **params: Any
    ) -> TextResult: ...
    @overload
    async def generate(
        self, prompt: Prompt, *, stream: Literal[True], **params: Any
    ) -> AsyncStream[TextChunk]: ...

    async def generate(
        self, prompt: Prompt, *, stream: bool = False, **params: Any
    ) -> TextResult | AsyncStream[TextChunk]:
        """Continue a prompt of text or token ids. ``params`` are the fields of the completions API."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **params}
        chunks: AsyncStream[TextChunk] = await self._start("completion", body, stream)
        if stream:
            return chunks
        done = await self._collect(chunks)
        return TextResult(done.choices(), done.usage)

    async def _start(self, kind: Kind, body: dict[str, Any], stream: bool) -> AsyncStream[Any]:
        return AsyncStream(await self._transport.generate(kind, body, stream=stream))

    @staticmethod
    async def _collect(chunks: AsyncStream[Any]) -> Collector:
        collector = Collector()
        async with chunks:
            while batch := await chunks.batch():
                collector.add(batch)
        return collector

    async def models(self) -> tuple[Model, ...]:
        """The models that the server answers for."""
        return msgspec.convert((await self._transport.ask("models", {}))["data"], tuple[Model, ...])

    async def status(self) -> dict[str, Any]:
        """The server's figures: actors, requests, pages; docs/cli.md names them."""
        return await self._transport.ask("status", {})

    async def ready(self) -> bool:
        """Whether the server takes requests now; False while it starts, restarts or stops."""
        try:
            answer = await self._transport.ask("ready", {})
        except NotReady:
            return False
        return bool(answer.get("ready", True))

    async def tokenize(self, text: str, **params: Any) -> tuple[int, ...]:
        """Token ids of ``text``."""
        return tuple((await self._transport.ask("tokenize", {"prompt": text, **params}))["tokens"])

    async def detokenize(self, tokens: Sequence[int], **params: Any) -> str:
        """Text of token ids."""
        return str((await self._transport.ask("detokenize", {"tokens": list(tokens), **params}))["prompt"])

    async def close(self) -> None:
        """End every open answer and the connection."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
