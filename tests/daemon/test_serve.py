"""The daemon before it has children: what a start says, refuses, and how it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.errors import StartFailed
from mstar import Client
from mstar.client.errors import ClientError, NotReady
from mstar.config.launch import Failed, News, Progress
from mstar.config.schema import Deployment, Listen
from mstar.daemon import serve
from mstar.daemon.serve import Daemon
from mstar.daemon.sockets import Sockets
from mstar.model.errors import ModelNotFound
from mstar.model.files import ModelFiles
from tests.helpers.waiting import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HASTE", 0.1)


class Finding:
    """Stands in for the search for a model: takes as long as the test wants."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def __call__(self, model: str, *, progress: Callable[[str, int, int], None]) -> ModelFiles:
        progress("downloading", 4, 10)
        self.begun.set()
        self.over.wait(10)
        raise ModelNotFound(f"There is no model {model!r}.")


@pytest.fixture
def finding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Finding]:
    found = Finding()
    monkeypatch.setattr(serve, "resolve", found)
    yield found
    found.over.set()


def daemon(path: Path, news: list[News], **options: int) -> Daemon:
    return Daemon(Deployment(listen=Listen(uds=str(path), tcp=False)), news=news.append, **options)


def beside(work: Callable[[], object]) -> threading.Thread:
    """Run `work` in a thread while the daemon has the main one."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_clients_hear_the_stage_while_the_model_is_fetched(path: Path, finding: Finding) -> None:
    news: list[News] = []
    heard: list[str] = []

    def visit() -> None:
        finding.begun.wait(5)
        with Client(path) as client:
            try:
                client.models()
            except NotReady as error:
                heard.append(str(error))
        finding.over.set()

    visitor = beside(visit)
    assert daemon(path, news).run() == 1
    visitor.join()
    assert heard == ["the server is starting: downloading 40 %"]
    assert Progress("daemon", "downloading", 4, 10) in news
    assert news[-1] == Failed("There is no model 'smollm2-135m-instruct'.")
    assert not path.exists()


def test_a_stop_does_not_wait_for_a_search_that_hangs(path: Path, finding: Finding) -> None:
    def stop() -> None:
        finding.begun.wait(5)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = beside(stop)
    news: list[News] = []
    assert daemon(path, news).run() == 0
    stopper.join()
    assert news[-1] == Failed("stopped before it was ready")
    assert not path.exists()


def test_the_end_of_the_parent_is_a_stop(path: Path, finding: Finding) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:

        def end() -> None:
            finding.begun.wait(5)
            parent.kill()

        ender = beside(end)
        assert daemon(path, [], parent=parent.pid).run() == 0
        ender.join()
    assert daemon(path, [], parent=parent.pid).run() == 0


@pytest.mark.behaviour("F-09")
def test_a_socket_in_use_ends_the_start_with_that_cause(path: Path) -> None:
    news: list[News] = []
    with Sockets(Listen(uds=str(path), tcp=False), {}):
        assert daemon(path, news).run() == 1
    assert isinstance(news[-1], Failed)
    assert "is in use by process" in news[-1].cause


def test_a_client_that_connects_before_anything_answers_is_served_late_not_refused(
    path: Path, finding: Finding
) -> None:
    def visit() -> None:
        def told() -> bool:
            with Client(path, timeout=5) as client:
                try:
                    client.models()
                except NotReady:
                    return True
            return False

        wait_until(told, excuse=(ClientError,))
        finding.over.set()

    visitor = beside(visit)
    assert daemon(path, []).run() == 1
    visitor.join()


def test_a_start_that_is_stopped_gives_actors_that_serve_nobody_little_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graces: list[float] = []

    class Starting:
        """A supervisor whose actors import for ever."""

        def __init__(self, wiring: object, **hooks: object) -> None:
            self.over = asyncio.Event()

        async def start(self) -> None:
            beside(lambda: os.kill(os.getpid(), signal.SIGTERM))
            await self.over.wait()
            raise StartFailed("stopped", "")

        async def stop(self, grace: float) -> None:
            graces.append(grace)
            self.over.set()

    monkeypatch.setattr(serve, "Supervisor", Starting)
    monkeypatch.setattr(serve, "resolve", lambda model, *, progress: ModelFiles("m", path))
    news: list[News] = []
    deployment = Deployment(listen=Listen(uds=str(path), tcp=False))
    assert Daemon(deployment, news=news.append, composer=lambda *parts, **more: None).run() == 0
    assert news[-1] == Failed("stopped before it was ready")
    assert graces == [serve.UNBORN]
