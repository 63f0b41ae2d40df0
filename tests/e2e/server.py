"""A real server in processes of its own, as a user starts it, and what there is to see of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from mstar import Client
from tests.helpers.waiting import wait_until

COMMAND = [sys.executable, "-m", "mstar.cli.main"]
# Longest a start or stop may take on a busy machine, in seconds.
PATIENCE = 60.0


def environment() -> dict[str, str]:
    """Without settings of whoever runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MSTAR_", "XDG_"))} | {
        name: value for name, value in os.environ.items() if name == "MSTAR_TEST_SUITE"
    }


def mstar(*arguments: object, timeout: float = PATIENCE, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment() | extra,
        check=False,
    )


class Server:
    """`mstar serve MODEL` on a free port and a socket in ``folder``; use as a context."""

    def __init__(self, model: Path, folder: Path, *flags: object, port: int = 0, wait: bool = True) -> None:
        self.socket = folder / "mstar.sock"
        self.log = folder / "server.log"
        command = [*COMMAND, "serve", str(model), "--port", str(port), "--uds", str(self.socket)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *map(str, flags)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
            )
        self.url = ""
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Read the announcement; raises AssertionError with the log when there is none."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = line.decode().split()
            if words[0] == "HTTP":
                self.url = words[1].removesuffix("/v1")
            if words[0] == "stop":
                return
        raise AssertionError(f"the server ended with {self.process.wait()}:\n{self.log.read_text()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self, **options: Any) -> Client:
        return Client(self.socket, **{"timeout": PATIENCE, **options})

    def actors(self) -> dict[str, dict[str, Any]]:
        """What `mstar status` knows of each actor, by name."""
        with self.client() as client:
            return {actor["actor"]: actor for actor in client.status()["daemon"]["actors"]}

    def tree(self) -> list[psutil.Process]:
        """The daemon and everything below it."""
        daemon = psutil.Process(self.pid)
        return [daemon, *daemon.children(recursive=True)]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(timeout)

    def stop(self) -> int:
        """End it in haste."""
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
            self.send(signal.SIGINT)
        code = self.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def shared_memory_of(pids: list[int]) -> list[str]:
    """Names in /dev/shm that one of these processes made; others on the machine have theirs."""
    return [name for name in os.listdir("/dev/shm") if any(f"-{pid}-" in name for pid in pids)]


def gone(processes: list[psutil.Process]) -> None:
    """Wait until none of these lives any more; a zombie is not alive."""

    def living() -> list[psutil.Process]:
        return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    wait_until(lambda: not living(), PATIENCE, what="the processes to end", excuse=(psutil.NoSuchProcess,))
