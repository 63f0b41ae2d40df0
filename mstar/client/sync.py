"""The synchronous client: the asynchronous one on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, Generic, Literal, Self, TypeVar, overload

from mstar.client.aio import AsyncClient, AsyncStream, C, Messages, Prompt
from mstar.client.errors import ClientClosed
from mstar.client.types import ChatChunk, ChatResult, Chunk, Model, TextChunk, TextResult

__all__ = ["Client", "Stream"]

T = TypeVar("T")


class _LoopThread:
    """A running loop that other threads hand coroutines to."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mstar-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and wait; it is cancelled when the wait is interrupted (Ctrl-C)."""
        if os.getpid() != self._pid:
            work.close()
            raise ClientClosed("the client was made before a fork; make a new one in this process")
        with self._lock:  # nothing is handed over once the loop was told to stop
            if self._closed:
                work.close()
                raise ClientClosed("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("the client was closed by another thread") from None
        except BaseException:
            future.cancel()
            raise

    @property
    def usable(self) -> bool:
        """Whether the thread runs, in this process."""
        return os.getpid() == self._pid and self._thread.is_alive()

    def finish(self, client: AsyncClient) -> None:
        """Close ``client``, end what other threads wait for, and then the loop; nothing is taken any more."""
        with self._lock:
            self._closed = True
        asyncio.run_coroutine_threadsafe(_wind_up(client), self.loop).result()
        self.stop()

    def stop(self) -> None:
        """End the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


class Stream(Generic[C]):
    """The chunks of one answer, for ``for``. Cancelled, closed, or dropped unread, it ends the request.

    ``cancel`` may be called from any thread; the iteration then ends.
    """

    def __init__(self, loop: _LoopThread, chunks: AsyncStream[C]) -> None:
        self._loop, self._stream = loop, chunks
        self._chunks: list[Chunk] = []

    def __iter__(self) -> Stream[C]:
        return self

    def __next__(self) -> C:
        if not self._chunks:
            self._chunks = self._loop.call(self._stream.batch())[::-1]
        if not self._chunks:
            raise StopIteration
        return self._chunks.pop()  # type: ignore[return-value]

    def cancel(self) -> None:
        """End the request on the server if it has not ended."""
        self._chunks = []
        self._loop.call(self._stream.aclose())

    close = cancel

    def __enter__(self) -> Stream[C]:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Client:
    """A client of one server; its methods may be called from several threads at once.

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
        self._loop = _LoopThread()
        try:
            self._client = self._loop.call(self._make(target, api_key, timeout))
        except BaseException:
            self._loop.stop()
            raise
        self._finalizer = weakref.finalize(self, _finish, self._loop, self._client)

    @staticmethod
    async def _make(
        target: str | os.PathLike[str] | None, api_key: str | None, patience: float | None
    ) -> AsyncClient:
        return AsyncClient(target, api_key=api_key, timeout=patience)

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **params: Any) -> ChatResult: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **params: Any) -> Stream[ChatChunk]: ...

    def chat(
        self, messages: Messages, *, stream: bool = False, **params: Any
    ) -> ChatResult | Stream[ChatChunk]:
        """Answer a conversation: a list of messages, or a text that stands for one user's message.

        ``params`` are the fields of the chat API (max_tokens, temperature, stop, n, ...).
        """
        if stream:
            return Stream(self._loop, self._loop.call(self._client.chat(messages, stream=True, **params)))
        result: ChatResult = self._loop.call(self._client.chat(messages, **params))
        return result

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[False] = False, **params: Any) -> TextResult: ...
    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **params: Any) -> Stream[TextChunk]: ...

    def generate(
        self, prompt: Prompt, *, stream: bool = False, **params: Any
    ) -> TextResult | Stream[TextChunk]:
        """Continue a prompt of text or token ids. ``params`` are the fields of the completions API."""
        if stream:
            return Stream(self._loop, self._loop.call(self._client.generate(prompt, stream=True, **params)))
        result: TextResult = self._loop.call(self._client.generate(prompt, **params))
        return result

    def models(self) -> tuple[Model, ...]:
        """The models that the server answers for."""
        return self._loop.call(self._client.models())

    def status(self) -> dict[str, Any]:
        """The server's figures: actors, requests, pages; docs/cli.md names them."""
        return self._loop.call(self._client.status())

    def ready(self) -> bool:
        """Whether the server takes requests now; False while it starts, restarts or stops."""
        return self._loop.call(self._client.ready())

    def tokenize(self, text: str, **params: Any) -> tuple[int, ...]:
        """Token ids of ``text``."""
        return self._loop.call(self._client.tokenize(text, **params))

    def detokenize(self, tokens: Sequence[int], **params: Any) -> str:
        """Text of token ids."""
        return self._loop.call(self._client.detokenize(tokens, **params))

    def close(self) -> None:
        """End every open answer and the connection."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finish(loop: _LoopThread, client: AsyncClient) -> None:
    if loop.usable:
        loop.finish(client)


async def _wind_up(client: AsyncClient) -> None:
    """Close ``client``, then end the calls that were just about to begin, and what they opened."""
    await client.close()
    late = asyncio.all_tasks() - {asyncio.current_task()}
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)
    await client.close()
