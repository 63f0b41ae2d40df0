"""A daemon for one turn: started for a budget, asked over its Unix socket, and stopped."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from mstar.client.aio import AsyncClient
from mstar.client.errors import ClientError

__all__ = ["Server", "ServerFailed"]

START_SECONDS = 300.0
STOP_SECONDS = 30.0


class ServerFailed(Exception):
    """The daemon ended or did not become ready; the message has its last words."""


class Server:
    """``mstar serve`` with these flags, ready; as a context manager it is ended at the end."""

    def __init__(self, model: str, flags: Sequence[str], folder: Path) -> None:
        self.socket = folder / "mstar.sock"
        self._log = folder / "mstar.log"
        command = [sys.executable, "-m", "mstar.cli.main", "serve", model, "--no-tcp"]
        command += ["--uds", str(self.socket), *flags]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def __enter__(self) -> Self:
        try:
            asyncio.run(self._wait())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    async def _wait(self) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < START_SECONDS:
            if self._process.poll() is not None:
                raise ServerFailed(f"the daemon ended while it started: {self._last_words()}")
            try:
                async with AsyncClient(self.socket) as client:
                    if await client.ready():
                        return
            except ClientError:
                pass  # no socket yet
            await asyncio.sleep(0.2)
        raise ServerFailed(f"the daemon was not ready in {START_SECONDS:.0f} s: {self._last_words()}")

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        return " ".join(self._log.read_text(errors="replace").split()[-60:])
