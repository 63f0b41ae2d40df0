"""SIGKILL of any process of a server's tree, at random, under load, round after round.

``python -m tools.bench.kill_soak --model DIR --rounds 50``

After every kill: each request ended with exactly one event (or with its connection, where the process that
held it died), no process of the tree is left over, nothing of it is in /dev/shm, and the
server, or the next one on the same socket, answers. Prints a line a round and a summary; exit code 1 when
anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import aiohttp
import psutil

from mstar import AsyncClient
from mstar.client.errors import ClientError
from mstar.client.frames import PREFACE, FrameReader, frame

__all__ = ["Outcome", "Round", "Soak", "Unsound"]

T = TypeVar("T")

STREAMS = 6
BODY = {"prompt": "the", "max_tokens": 4000, "ignore_eos": True, "stream": True}
TERMINAL = ("done", "error", "result")
PATIENCE = 60.0
# How soon the children of a killed daemon must be gone, in seconds.
ORPHAN_SECONDS = 2.0
# A cell that dies more often than this in a row, without a minute of health between, is given up.
RESTARTS = 5


class Unsound(Exception):
    """Something was left, lost or said twice."""


class Outcome(NamedTuple):
    """How one request ended: how many terminal events came, and whether the connection ended instead."""

    protocol: str
    terminal: int
    closed: bool


class Round(NamedTuple):
    """One kill: who, how the requests ended, and seconds until the tree was gone or served again."""

    victim: str
    done: int
    errors: int
    closed: int
    recovered: float


async def native_stream(path: Path, started: asyncio.Event) -> Outcome:
    """Read one native request to the end of its connection, or a little past its terminal event."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    frames, terminal, closed = FrameReader(), 0, False
    writer.write(PREFACE + frame({"op": "generate", "id": 1, "kind": "completion", "body": BODY}))
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0.2 if terminal else PATIENCE):
                try:
                    data = await reader.read(65536)
                except ConnectionError:
                    data = b""
            if not data:
                closed = True
                break
            started.set()
            terminal += sum(event["event"] in TERMINAL for event, _ in frames.feed(data))
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return Outcome("native", terminal, closed and not terminal)


async def http_stream(base: str, started: asyncio.Event) -> Outcome:
    """Read one HTTP stream; [DONE] and an error event are terminal, and so is an error status."""
    terminal = 0
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as session:
            body = {**BODY, "model": (await _json(session, f"{base}/v1/models"))["data"][0]["id"]}
            async with session.post(f"{base}/v1/completions", json=body) as response:
                if response.status != 200:
                    await response.read()
                    return Outcome("http", 1, closed=False)
                async for line in response.content:
                    started.set()
                    terminal += line.startswith((b"data: [DONE]", b'data: {"error"'))
    except (aiohttp.ClientError, ConnectionError):
        return Outcome("http", terminal, closed=not terminal)
    return Outcome("http", terminal, closed=not terminal)


async def _json(session: aiohttp.ClientSession, url: str) -> dict[str, list[dict[str, str]]]:
    async with session.get(url) as response:
        found: dict[str, list[dict[str, str]]] = await response.json()
        return found


class Soak:
    """Keeps one server of ``model`` alive on a socket of its own, and breaks it."""

    def __init__(self, model: str, seed: int) -> None:
        self.model = model
        self.random = random.Random(seed)
        self.folder = tempfile.TemporaryDirectory(prefix="mstar-soak-")
        self.socket = Path(self.folder.name, "s")
        self.log = Path(self.folder.name, "log").open("wb")  # noqa: SIM115 - as long as the object
        self.pids: set[int] = set()
        self.deaths: Counter[str] = Counter()
        self.daemon: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Start a server on the socket, whatever the last one left, and wait until it is ready."""
        self.deaths.clear()
        command = [sys.executable, "-m", "mstar.cli.main", "serve", self.model, "--port", "0"]
        command += ["--uds", str(self.socket)]
        self.daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log)
        assert self.daemon.stdout is not None
        for line in self.daemon.stdout:
            words = line.decode().split()
            if words[0] == "HTTP":
                self.url = words[1].removesuffix("/v1")
            if words[0] == "stop":
                return
        raise Unsound(f"the server did not start, exit code {self.daemon.wait()}")

    def close(self) -> None:
        """End the server."""
        if self.daemon is not None:
            if self.daemon.poll() is None:
                self.daemon.terminate()
                self.daemon.send_signal(2)
            self.daemon.wait(PATIENCE)
            if self.daemon.stdout is not None:
                self.daemon.stdout.close()
            self.daemon = None
        self.log.close()
        self.folder.cleanup()

    def tree(self) -> dict[str, psutil.Process]:
        """The processes of the server by name: "daemon", and what its children say they are."""
        assert self.daemon is not None
        daemon = psutil.Process(self.daemon.pid)
        found = {"daemon": daemon}
        for child in daemon.children(recursive=True):
            found[f"child {child.pid}"] = child
        return found

    async def round(self) -> Round:
        """Load, kill, look. Raises Unsound."""
        if self.daemon is None:
            self.start()
        async with AsyncClient(self.socket, timeout=PATIENCE) as client:
            actors = {a["pid"]: a["actor"] for a in (await client.status())["daemon"]["actors"]}
        started = [asyncio.Event() for _ in range(STREAMS)]
        requests = [
            asyncio.ensure_future(
                native_stream(self.socket, event) if i % 2 else http_stream(self.url, event)
            )
            for i, event in enumerate(started)
        ]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), PATIENCE)
        await asyncio.sleep(self.random.random() * 0.3)
        tree = self.tree()
        self.pids |= {process.pid for process in tree.values()}
        name = self.random.choice(sorted(tree))
        victim = actors.get(tree[name].pid, name)
        began = time.monotonic()
        tree[name].kill()
        outcomes = await asyncio.gather(*requests)
        self._check(victim, outcomes)
        await self._recover(victim, list(tree.values()))
        leaked = wait_gone(lambda: shared_memory(self.pids))
        if leaked:
            raise Unsound(f"/dev/shm holds {leaked}")
        ends = Counter("closed" if o.closed else "ended" for o in outcomes)
        errors = ends["ended"] if victim.startswith("rank") else 0
        return Round(victim, ends["ended"] - errors, errors, ends["closed"], time.monotonic() - began)

    def _check(self, victim: str, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.terminal > 1:
                raise Unsound(f"a {outcome.protocol} request had {outcome.terminal} terminal events")
            if outcome.closed and victim.startswith("rank"):
                raise Unsound(f"a {outcome.protocol} connection was closed though its gateway lives")

    async def _recover(self, victim: str, tree: list[psutil.Process]) -> None:
        assert self.daemon is not None
        self.deaths[victim] += 1
        if victim == "daemon" or self.deaths[victim] > RESTARTS:
            await asyncio.to_thread(self.daemon.wait, PATIENCE)
            if self.daemon.stdout is not None:
                self.daemon.stdout.close()
            self.daemon = None
            left = wait_gone(lambda: [p.pid for p in tree if alive(p)])
            if left:
                raise Unsound(f"the processes {left} outlived their daemon by {ORPHAN_SECONDS:g} s")
            self.start()
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                async with AsyncClient(self.socket, timeout=PATIENCE) as client:
                    answer = await client.generate("the", max_tokens=3, ignore_eos=True)
                if answer.usage.completion_tokens != 3:
                    raise Unsound(f"the server answered {answer.usage.completion_tokens} tokens instead of 3")
                return
            except ClientError as error:
                if time.monotonic() > deadline:
                    raise Unsound(f"the server did not recover in {PATIENCE:g} s: {error}") from error
                await asyncio.sleep(0.05)


def alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory(pids: set[int]) -> list[str]:
    """Names in /dev/shm that one of these processes made; others on the machine have theirs."""
    return [name for name in os.listdir("/dev/shm") if any(f"-{pid}-" in name for pid in pids)]


def wait_gone(look: Callable[[], list[T]]) -> list[T]:
    """What `look` still finds after ORPHAN_SECONDS."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def soaking(model: str, seed: int) -> Iterator[Soak]:
    """A Soak that is closed at the end."""
    soak = Soak(model, seed)
    try:
        yield soak
    finally:
        soak.close()


async def run(model: str, rounds: int, seed: int) -> int:
    """Soak for ``rounds`` kills; returns the exit code."""
    victims: Counter[str] = Counter()
    with soaking(model, seed) as soak:
        for number in range(1, rounds + 1):
            try:
                found = await soak.round()
            except Unsound as error:
                print(f"round {number}: {error}", file=sys.stderr)
                return 1
            victims[found.victim] += 1
            print(json.dumps({"round": number, **found._asdict()}), flush=True)
    print(json.dumps({"rounds": rounds, "seed": seed, "victims": dict(victims), "unsound": 0}))
    return 0


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what to serve")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return asyncio.run(run(options.model, options.rounds, options.seed))


if __name__ == "__main__":
    sys.exit(main())
