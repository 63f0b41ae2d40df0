"""OpenAI's HTTP API, for servers that are not on this host's Unix socket. Every answer is streamed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from mstar.client.errors import (
    BadRequest,
    ClientClosed,
    ClientError,
    ConnectionLost,
    ProtocolError,
    ServerUnreachable,
    TimedOut,
    from_error,
)
from mstar.client.sse import EventReader
from mstar.client.transport import CHUNKS, Kind
from mstar.client.types import Chunk, Usage, entries

__all__ = ["HttpTransport"]

_PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
_QUESTIONS = {
    "models": ("GET", "/v1/models"),
    "status": ("GET", "/status"),
    "ready": ("GET", "/ready"),
    "tokenize": ("POST", "/tokenize"),
    "detokenize": ("POST", "/detokenize"),
}


def _reason(error: aiohttp.ClientConnectorError) -> str:
    """Why there was no connection, in the system's words, without errno and without the address again."""
    found = error.os_error
    if found.errno is not None and found.errno > 0:
        return os.strerror(found.errno)
    return found.strerror or str(found)  # a name that does not resolve has a negative number


def _serialize(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequest(f"the request cannot be sent: {error}") from error


def _error_of(status: int, body: bytes, headers: Mapping[str, str]) -> ClientError:
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        decoded = {"error": {"message": body.decode(errors="replace").strip()[:500]}}
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else {}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    retry = headers.get("Retry-After", "")
    return from_error(error, status, float(retry) if retry.isdigit() else None)


class _HttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse, kind: Kind, timeout: float | None) -> None:
        self._response, self._kind, self._timeout = response, kind, timeout
        self._events = EventReader()
        self._failure: ClientError | None = None
        self._complete = False
        self._cancelled = False

    async def batch(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        while not chunks and not self._complete and not self._cancelled:
            self._check()
            data = await self._read()
            for event in self._events.feed(data):
                if event == b"[DONE]":
                    self._complete = True
                    self._response.release()
                    break
                chunks.extend(self._chunks(event))
        return chunks

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                data = await self._response.content.readany()
        except TimeoutError:
            self.cancel()
            raise TimedOut(f"nothing came from {self._response.url} for {self._timeout:g} s") from None
        except asyncio.CancelledError:
            self.cancel()
            raise
        except aiohttp.ClientError as error:
            if self._cancelled:
                return b""
            raise ConnectionLost(
                f"the connection to {self._response.url} ended before the answer did: {error}"
            ) from error
        if not data and not self._cancelled:
            raise ConnectionLost(f"the connection to {self._response.url} ended before the answer did")
        return data

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _chunks(self, event: bytes) -> list[Chunk]:
        make = CHUNKS[self._kind]
        try:
            message = msgspec.json.decode(event)
            if "error" in message:
                self._fail(from_error(message["error"], 0))
                return []
            found = []
            for choice in message.get("choices") or ():
                text = choice["delta"].get("content") if self._kind == "chat" else choice["text"]
                chunk = make(
                    choice=choice["index"],
                    text=text or "",
                    logprobs=entries(choice.get("logprobs")),
                    finish_reason=choice.get("finish_reason"),
                )
                if chunk.text or chunk.logprobs or chunk.finish_reason:
                    found.append(chunk)
            if message.get("usage"):
                usage = msgspec.convert(message["usage"], Usage)
                found.append(make(choice=-1, usage=usage))
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            self._fail(ProtocolError(f"the server sent an event that is no chunk: {event[:200]!r} ({error})"))
            return []
        return found

    def _fail(self, error: ClientError) -> None:
        self._failure = error
        self._response.close()

    def cancel(self) -> None:
        self._cancelled = True
        self._response.close()


class HttpTransport:
    """The way to a server at ``base`` (http://host:port, with or without /v1).

    ``timeout`` is in seconds without a byte of an answer; None waits for ever.
    """

    def __init__(self, base: str, api_key: str | None = None, timeout: float | None = None) -> None:
        self._base = base.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None
        self._model: str | None = None
        self._closed = False

    async def _request(self, method: str, path: str, body: Any = None) -> aiohttp.ClientResponse:
        if self._closed:
            raise ClientClosed("the client is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),
                json_serialize=_serialize,
            )
        try:
            async with asyncio.timeout(self._timeout):
                return await self._session.request(method, self._base + path, json=body)
        except TimeoutError:
            raise TimedOut(f"nothing came from {self._base} for {self._timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise ServerUnreachable(f"no server answers at {self._base} ({_reason(error)})") from error
        except aiohttp.InvalidURL as error:
            raise ServerUnreachable(
                f"{self._base!r} is no URL of a server, such as http://host:8000"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(f"the connection to {self._base} was lost: {error}") from error

    async def generate(self, kind: Kind, body: dict[str, Any], *, stream: bool) -> _HttpAnswer:
        if not body.get("model"):
            if self._model is None:
                self._model = (await self.ask("models", {}))["data"][0]["id"]
            body = {**body, "model": self._model}
        options = {**(body.get("stream_options") or {}), "include_usage": True}
        response = await self._request(
            "POST", _PATHS[kind], {**body, "stream": True, "stream_options": options}
        )
        if response.status != 200:
            raise _error_of(response.status, await self._body(response), response.headers)
        return _HttpAnswer(response, kind, self._timeout)

    async def ask(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        method, path = _QUESTIONS[what]
        response = await self._request(method, path, body if method == "POST" else None)
        data = await self._body(response)
        if response.status != 200:
            raise _error_of(response.status, data, response.headers)
        try:
            result: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self._base}{path} answered with something else than JSON") from error
        return result

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                return await response.read()
        except TimeoutError:
            raise TimedOut(f"nothing came from {self._base} for {self._timeout:g} s") from None
        except aiohttp.ClientError as error:
            raise ConnectionLost(f"the connection to {self._base} was lost: {error}") from error

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()
