"""The waiting room: an answer for everybody who comes before a gateway exists."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mstar.client.aio import AsyncClient
from mstar.client.errors import NotReady
from mstar.client.frames import PREFACE
from mstar.daemon.serve import loop_factory
from mstar.daemon.waiting import Visitor, WaitingRoom, answer


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


@pytest.mark.parametrize("loop", [asyncio.SelectorEventLoop, loop_factory()], ids=["asyncio", "installed"])
def test_both_protocols_hear_the_stage_and_the_socket_stays_open(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    with listening(tmp_path / "s") as unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(visit([unix, tcp], tmp_path / "s", f"http://127.0.0.1:{tcp.getsockname()[1]}"))
        with socket.socket(socket.AF_UNIX) as late:
            late.connect(str(tmp_path / "s"))


async def visit(listeners: list[socket.socket], *targets: str | Path) -> None:
    async with WaitingRoom(listeners, lambda: "downloading 40 %"):
        for target in targets:
            async with AsyncClient(target) as client:
                assert not await client.ready()
                with pytest.raises(NotReady, match="downloading 40 %"):
                    await client.generate("x" * 300_000, model="m")


def test_what_is_sent_depends_on_the_first_bytes_only_once_they_tell() -> None:
    assert answer(b"MS", "x") is None
    assert b"not_ready" in (answer(PREFACE + b"more", "x") or b"")
    assert answer(b"GET /ready HTTP/1.1\r\n", "x") is None
    assert (answer(b"GET /ready HTTP/1.1\r\n\r\n", "x") or b"").startswith(b"HTTP/1.1 503 ")
    assert (answer(b"GET /health HTTP/1.1\r\n\r\n", "x") or b"").startswith(b"HTTP/1.1 200 ")
    assert (answer(b"x" * 70_000, "x") or b"").startswith(b"HTTP/1.1 503 ")


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.pieces.append(bytes(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def abort(self) -> None:
        raise AssertionError("cut though it was answered at once")


async def test_a_client_is_answered_once_however_long_its_body_is() -> None:
    visitor, transport = Visitor(lambda: "x"), Written()
    visitor.connection_made(transport)
    visitor.data_received(b"POST /v1/completions HTTP/1.1\r\n\r\n")
    for _ in range(10):
        visitor.data_received(b"y" * 50_000 + b"\r\n\r\n")
    visitor.connection_lost(None)
    assert (len(transport.pieces), transport.ended) == (1, True)
