"""A native server that does what a test tells it to, message by message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from mstar.client.frames import PREFACE, FrameReader, frame

Script = Callable[["Peer", dict[str, Any]], None]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


class Peer(asyncio.Protocol):
    """One client's connection: collects what the client sends, and hands each message to the script."""

    def __init__(self, server: NativeServer) -> None:
        self.server = server
        self.preface = b""
        self.reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.peers.append(self)

    def data_received(self, data: bytes) -> None:
        missing = len(PREFACE) - len(self.preface)
        self.preface, data = self.preface + data[:missing], data[missing:]
        for message, _ in self.reader.feed(data):
            self.server.received.append(message)
            self.server.script(self, message)

    def send(self, ident: int, event: str, **fields: Any) -> None:
        self.transport.write(frame({"id": ident, "event": event, **fields}))


class NativeServer:
    """Listens on a Unix socket; ``script`` is called with every message."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.received: list[dict[str, Any]] = []
        self.peers: list[Peer] = []

    def ops(self, op: str) -> list[dict[str, Any]]:
        return [message for message in self.received if message["op"] == op]


@contextlib.asynccontextmanager
async def native_server(path: Path, script: Script) -> AsyncIterator[NativeServer]:
    server = NativeServer(script)
    listening = await asyncio.get_running_loop().create_unix_server(lambda: Peer(server), str(path))
    try:
        yield server
    finally:
        listening.close()
        for peer in server.peers:
            peer.transport.abort()


def answering(*texts: str, choices: int = 1) -> Script:
    """Answer every generation with these pieces for each choice."""

    def script(peer: Peer, message: dict[str, Any]) -> None:
        if message["op"] != "generate":
            return
        for text in texts:
            for choice in range(choices):
                peer.send(message["id"], "delta", choice=choice, text=text, tokens=[1], logprobs=None)
        for choice in range(choices):
            peer.send(message["id"], "finish", choice=choice, reason="stop")
        peer.send(message["id"], "done", usage=USAGE)

    return script
