"""A client that sees bytes: half-closes, resets, refuses to read, and splits event streams."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import msgspec


def http_post(path: str, body: Any, *, version: str = "1.1", headers: tuple[str, ...] = ()) -> bytes:
    """The bytes of a request."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(payload)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


def events(body: bytes) -> list[Any]:
    """The data of an event stream: decoded JSON, or the string [DONE]."""
    found: list[Any] = []
    for block in body.decode().split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


class RawClient:
    """One connection, to a port or to a Unix socket's path."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, target: int | str, *, receive_buffer: int | None = None) -> RawClient:
        family = socket.AF_INET if isinstance(target, int) else socket.AF_UNIX
        sock = socket.socket(family)
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        address = ("127.0.0.1", target) if isinstance(target, int) else target
        await asyncio.get_running_loop().sock_connect(sock, address)
        return cls(sock)

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.sock, data)

    async def receive(self, size: int = 65536) -> bytes:
        async with asyncio.timeout(10):
            return await self.loop.sock_recv(self.sock, size)

    async def until(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`, or to the end of the connection."""
        found = b""
        while mark not in found:
            data = await self.receive()
            if not data:
                break
            found += data
        return found

    async def rest(self) -> bytes:
        """Everything to the end of the connection."""
        found = b""
        while data := await self.receive():
            found += data
        return found

    def half_close(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()


PREFACE = b"MSTAR\x01\r\n"


class NativeClient(RawClient):
    """Speaks frames."""

    buffer = b""

    @classmethod
    async def open(cls, path: str, **options: Any) -> NativeClient:
        plain = await RawClient.connect(path, **options)
        client = cls(plain.sock)
        await client.send(PREFACE)
        return client

    async def ask(self, **message: Any) -> None:
        payload = msgspec.msgpack.encode(message)
        await self.send(len(payload).to_bytes(4, "little") + payload)

    async def event(self) -> Any:
        """The next event, or None at the end of the connection."""
        while len(self.buffer) < 4 or len(self.buffer) < 4 + int.from_bytes(self.buffer[:4], "little"):
            data = await self.receive()
            if not data:
                return None
            self.buffer += data
        end = 4 + int.from_bytes(self.buffer[:4], "little")
        frame, self.buffer = self.buffer[4:end], self.buffer[end:]
        return msgspec.msgpack.decode(frame)

    async def until_end(self, ident: int) -> list[Any]:
        """Events up to the terminal one of `ident`."""
        found = []
        while True:
            event = await self.event()
            found.append(event)
            if event is None or (event["id"] == ident and event["event"] in ("done", "error", "result")):
                return found
