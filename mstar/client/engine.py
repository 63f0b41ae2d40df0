"""A private daemon for one program."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mstar.client.launch import launch
from mstar.client.sync import Client
from mstar.config.launch import Launch, Progress
from mstar.config.load import ConfigError, resolve
from mstar.config.options import OPTIONS

__all__ = ["Engine"]

_NAMES = {flag.lstrip("-").replace("-", "_"): entry.path for entry in OPTIONS for flag in entry.flags}
# Longest a daemon may take to end after its orders before it is killed, in seconds.
STOP_SECONDS = 20.0


class Engine(Client):
    """A client with a daemon of its own: it starts with the object and ends with it.

    The daemon listens on a Unix socket in a private directory and on no port. It ends when the
    object is closed, at the end of a ``with`` block, when the program exits, and also when the
    program is killed. ``deployment`` takes the settings of a deployment, by their key in the file
    (max_seq_len) or the name of their flag (max_model_len); environment variables count as for
    ``mstar serve``. ``progress`` is called with each stage of the start; ``log`` is a file that takes
    the daemon's log. Raises ConfigError for a setting and EngineFailed when the start fails.
    """

    def __init__(
        self,
        model: str = "smollm2-135m-instruct",
        *,
        timeout: float | None = None,
        progress: Callable[[Progress], None] | None = None,
        log: str | os.PathLike[str] | None = None,
        **deployment: Any,
    ) -> None:
        directory = Path(tempfile.mkdtemp(prefix="mstar-engine-"))
        process: subprocess.Popen[bytes] | None = None
        try:
            order = _order(model, deployment, directory / "mstar.sock")
            sink = os.open(os.devnull if log is None else log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                process = launch(order, log=sink, progress=progress).process
            finally:
                os.close(sink)
            self._daemon = weakref.finalize(self, _stop, process, directory)
            super().__init__(directory / "mstar.sock", timeout=timeout)
        except BaseException:
            _stop(process, directory)
            raise
        self.pid = process.pid

    def close(self) -> None:
        """End every open answer, then the daemon, and wait until it is gone."""
        try:
            super().close()
        finally:
            self._daemon()


def _order(model: str, deployment: dict[str, Any], socket: Path) -> Launch:
    settings: dict[str, Any] = {"model": model}
    for name, value in deployment.items():
        path = _NAMES.get(name, name)
        if path.startswith("listen."):
            raise ConfigError(f"{name} cannot be set: an engine listens on its own private socket only")
        settings[path] = value
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {entry.variable for entry in OPTIONS if entry.path.startswith("listen.")}
    }
    private = {"listen.uds": str(socket), "listen.tcp": False}
    resolved = resolve(None, environment, {**settings, **private}, label="argument")
    return Launch(resolved.deployment, resolved.sources, parent=os.getpid())


def _stop(process: subprocess.Popen[bytes] | None, directory: Path) -> None:
    if process is not None and process.poll() is None:
        # Nobody is left to read the answers, so the second one hastens; equal signals would become one.
        for order in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(order)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(directory, ignore_errors=True)
