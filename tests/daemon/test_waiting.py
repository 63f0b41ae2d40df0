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
from mstar.daemon.waiting import WaitingRoom, answer


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
