"""SIGKILL of processes of a real server."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from mstar.client.errors import ClientError, ConnectionLost, ServerError
from tests.e2e.server import Server, gone, shared_memory_of
from tests.helpers.waiting import wait_until
from tools.bench.kill_soak import soaking

pytestmark = pytest.mark.timeout(120)


class Streaming:
    """A long stream read by a thread, and how it ended."""

    def __init__(self, server: Server) -> None:
        self.client = server.client()
        self.stream = self.client.generate("the", max_tokens=8000, ignore_eos=True, stream=True)
        self.chunks = 0
        self.error: ClientError | None = None
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        wait_until(lambda: self.chunks)

    def _read(self) -> None:
        try:
            for _ in self.stream:
                self.chunks += 1
        except ClientError as error:
            self.error = error

    def end(self) -> ClientError | None:
        self.thread.join(30)
        self.client.close()
        return self.error


@pytest.mark.behaviour("F-07", "F-08")
def test_killed_with_its_daemon_a_tree_leaves_nothing_and_the_next_start_works(
    model: Path, folder: Path
) -> None:
    with Server(model, folder) as server:
        reading, tree = Streaming(server), server.tree()
        os.kill(server.pid, signal.SIGKILL)
        assert isinstance(reading.end(), ConnectionLost)
        gone(tree)
        assert server.wait() == -signal.SIGKILL
    assert (folder / "mstar.sock").exists()
    assert shared_memory_of([process.pid for process in tree]) == []
    with Server(model, folder) as again, again.client() as client:
        assert client.generate("the", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    assert sorted(path.name for path in folder.iterdir()) == ["server.log"]


@pytest.mark.behaviour("F-08")
def test_a_killed_rank_ends_its_requests_with_one_error_and_comes_back(model: Path, folder: Path) -> None:
    with Server(model, folder) as server, server.client() as client:
        reading, before = Streaming(server), server.actors()
        os.kill(before["rank/0"]["pid"], signal.SIGKILL)
        error = reading.end()
        assert isinstance(error, ServerError)
        assert "rank/0" in str(error)
        assert "SIGKILL" in str(error)
        wait_until(client.ready, 30, what="the rank to be back")
        after = server.actors()
        assert (after["rank/0"]["restarts"], after["rank/0"]["generation"]) == (1, 2)
        assert after["gateway/0"]["pid"] == before["gateway/0"]["pid"]
        assert client.generate("the", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


def test_a_killed_gateway_comes_back_on_the_same_port_and_socket(model: Path, folder: Path) -> None:
    with Server(model, folder) as server:
        reading, before = Streaming(server), server.actors()
        os.kill(before["gateway/0"]["pid"], signal.SIGKILL)
        assert isinstance(reading.end(), ConnectionLost)
        with server.client() as client:
            wait_until(client.ready, 30, excuse=(ClientError,), what="the gateway to be back")
            ranks = client.status()["ranks"]
            assert client.generate("the", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
        after = server.actors()
        assert after["rank/0"]["pid"] == before["rank/0"]["pid"]
        assert after["gateway/0"]["generation"] == 2
        assert ranks == {} or ranks["rank/0"]["running"] == 0


@pytest.mark.behaviour("F-07", "F-08", "F-19")
async def test_whoever_is_killed_under_load_nothing_is_left_and_each_request_ends_once(model: Path) -> None:
    with soaking(str(model), seed=7) as soak:
        rounds = [await soak.round() for _ in range(5)]
    assert len({found.victim for found in rounds}) > 1


@pytest.mark.long
def test_a_cell_that_dies_again_and_again_ends_the_server_with_the_cause(model: Path, folder: Path) -> None:
    killed = set()
    with Server(model, folder) as server:

        def over() -> bool:
            if server.process.poll() is not None:
                return True
            for name, actor in server.actors().items():
                if name == "rank/0" and actor["pid"] and actor["pid"] not in killed:
                    killed.add(actor["pid"])
                    os.kill(actor["pid"], signal.SIGKILL)
            return False

        wait_until(over, 100, excuse=(ClientError, ProcessLookupError), interval=0.02)
        assert server.wait() == 1
    last = server.log.read_text().splitlines()[-1]
    assert "cell 'cell/0' is given up" in last
    assert "SIGKILL" in last
