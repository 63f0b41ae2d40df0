"""The synchronous client, used from threads."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mstar import Client
from mstar.client.errors import ClientClosed, ClientError
from tests.client.fakes import NativeServer, answering, native_server
from tests.helpers.waiting import wait_until


class Background:
    """A native server on a loop of its own thread."""

    def __init__(self, path: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.context = native_server(path, answering("a", "b"))
        self.server: NativeServer = self.call(self.context.__aenter__())

    def call(self, work):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(5)

    def close(self) -> None:
        self.call(self.context.__aexit__(None, None, None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def server(tmp_path: Path):  # type: ignore[no-untyped-def]
    background = Background(tmp_path / "s")
    yield background.server
    background.close()


def test_the_methods_give_the_same_as_the_asynchronous_ones(server: NativeServer, tmp_path: Path) -> None:
    with Client(tmp_path / "s") as client:
        assert client.chat("hi").text == "ab"
        assert client.generate([1, 2]).text == "ab"
        assert [chunk.text for chunk in client.generate("x", stream=True)] == ["a", "b", "", ""]
    assert server.received[1]["body"] == {"prompt": [1, 2]}


def test_many_threads_may_share_one_client(server: NativeServer, tmp_path: Path) -> None:
    with Client(tmp_path / "s") as client, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: client.chat(f"{i}").text, range(64)))
    assert results == ["ab"] * 64
    assert len(server.peers) == 1


def test_another_thread_may_end_an_iteration(server: NativeServer, tmp_path: Path) -> None:
    server.script = lambda peer, message: None
    with Client(tmp_path / "s") as client:
        stream = client.chat("x", stream=True)
        found: list[object] = []
        reader = threading.Thread(target=lambda: found.append(list(stream)))
        reader.start()
        stream.cancel()
        reader.join(5)
        assert found == [[]]
        wait_until(lambda: server.ops("cancel"))


def test_leaving_the_loop_early_ends_the_request(server: NativeServer, tmp_path: Path) -> None:
    server.script = lambda peer, message: peer.send(message["id"], "delta", choice=0, text="a", tokens=[])
    with Client(tmp_path / "s") as client:
        for chunk in client.chat("x", stream=True):
            assert chunk.text == "a"
            break
        wait_until(lambda: server.ops("cancel"))


def test_a_closed_client_says_so(server: NativeServer, tmp_path: Path) -> None:
    client = Client(tmp_path / "s")
    client.close()
    client.close()
    with pytest.raises(ClientClosed):
        client.chat("x")


def test_a_client_from_before_a_fork_says_so_instead_of_hanging(server: NativeServer, tmp_path: Path) -> None:
    with Client(tmp_path / "s") as client:
        client._loop._pid = os.getpid() + 1
        with pytest.raises(ClientClosed, match="fork"):
            client.chat("x")
        client._loop._pid = os.getpid()


def test_closing_a_client_ends_the_calls_of_other_threads(server: NativeServer, tmp_path: Path) -> None:
    """Whichever comes first, the call or the end of the loop: nobody waits for ever."""
    server.script = lambda peer, message: None
    for _ in range(50):
        client = Client(tmp_path / "s")
        ended: list[BaseException | str] = []

        def ask(client: Client = client, ended: list[BaseException | str] = ended) -> None:
            try:
                ended.append(client.chat("x").text)
            except ClientError as error:
                ended.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        client.close()
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
        assert len(ended) == 3
