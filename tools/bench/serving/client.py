"""One streamed request against an OpenAI-compatible server, and the times of its events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from tools.bench.serving.exchange import Exchange
from tools.bench.serving.workload import Job, prompt_text, prompt_tokens

__all__ = ["Client", "Target"]


class Target(msgspec.Struct, frozen=True):
    """A server and how it wants to be asked.

    ``url`` is its root, without /v1; over a Unix socket the host in it is only a name. ``endpoint`` is
    "completions" or "chat"; ``prompt`` is "tokens" (exact lengths, completions only) or "text".
    ``keep_alive`` False opens a connection a request, for servers that close theirs without notice.
    """

    url: str
    model: str
    uds: str | None = None
    endpoint: str = "completions"
    prompt: str = "tokens"
    vocab_size: int = 30_000
    api_key: str | None = None
    ignore_eos: bool = True
    keep_alive: bool = True
    extra: dict[str, Any] = msgspec.field(default_factory=dict)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)
_encoder = msgspec.json.Encoder()


class Client:
    """Sends jobs to one target. Use as an asynchronous context manager."""

    def __init__(self, target: Target, *, clock: Callable[[], float], timeout: float = 600.0) -> None:
        self._target = target
        self._clock = clock
        path = "/v1/chat/completions" if target.endpoint == "chat" else "/v1/completions"
        self._url = target.url.rstrip("/") + path
        headers = {"Content-Type": "application/json"}
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        connector: aiohttp.BaseConnector
        if target.uds:
            connector = aiohttp.UnixConnector(target.uds, limit=0, force_close=not target.keep_alive)
        else:
            connector = aiohttp.TCPConnector(limit=0, force_close=not target.keep_alive)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout)
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def body(self, job: Job) -> bytes:
        """The request of ``job``: greedy, streamed, with usage, and to the length the job wants."""
        target = self._target
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": job.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt_text(job)}]
        elif target.prompt == "text":
            body["prompt"] = prompt_text(job)
        else:
            body["prompt"] = prompt_tokens(job, target.vocab_size)
        if target.ignore_eos:
            body["ignore_eos"] = True
        return _encoder.encode(body | target.extra)

    async def send(self, job: Job, due: float, on_text: Callable[[], None] | None = None) -> Exchange:
        """Send ``job`` and read its answer to the end; ``on_text`` is called after each text event is booked.

        Never raises for what the server or the network does: the exchange tells it.
        """
        exchange = Exchange(job.group, due)
        body = self.body(job)
        exchange.sent = self._clock()
        try:
            async with self._session.post(self._url, data=body) as response:
                exchange.status = response.status
                if response.status != 200:
                    exchange.error = f"{response.status}: {(await response.text())[:200]}"
                else:
                    await self._read(response.content, exchange, on_text or _nothing)
        except (TimeoutError, aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            exchange.error = f"{type(error).__name__}: {error}"[:200]
        exchange.ended = self._clock()
        return exchange

    async def answers(self, path: str) -> bool:
        """Whether the server answers a GET of ``path`` with 200."""
        try:
            async with self._session.get(self._target.url.rstrip("/") + path) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def _read(
        self, content: aiohttp.StreamReader, exchange: Exchange, on_text: Callable[[], None]
    ) -> None:
        """Read server-sent events up to [DONE]; a line is complete before it is looked at."""
        rest = b""
        async for piece in content.iter_any():
            now = self._clock()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _decoder.decode(data)
                if event.error is not None:
                    exchange.error = f"event: {event.error}"[:200]
                    return
                if _note(event, exchange, now):
                    on_text()
        exchange.error = "the stream ended without [DONE]"


def _note(event: _Event, exchange: Exchange, now: float) -> bool:
    """Book ``event``, received at ``now``; returns whether it carried text."""
    known = exchange.output_tokens
    if event.usage is not None:
        exchange.prompt_tokens = event.usage.prompt_tokens
        exchange.output_tokens = event.usage.completion_tokens
    if not any(map(_has_text, event.choices)):
        return False
    if event.usage is not None and len(exchange.sizes) == len(exchange.events):
        exchange.sizes.append(max(exchange.output_tokens - known, 1))
    exchange.events.append(now)
    return True


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or (delta and (delta.content or delta.reasoning_content)))


def _nothing() -> None:
    return None
