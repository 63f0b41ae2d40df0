"""`mstar serve`: a daemon in the foreground or in the background."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from mstar.cli.settings import add_settings, resolved
from mstar.cli.table import ProgressLine
from mstar.config.launch import Failed, Launch, News, Progress, Ready
from mstar.config.load import ConfigError, Resolved
from mstar.config.paths import default_log

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings, --daemon and --log-file."""
    parser.add_argument(
        "--daemon",
        action="store_true",
        help="return once the server is ready, and let it run in the background",
    )
    parser.add_argument("--log-file", metavar="FILE", help="where a background server writes its log")
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Serve; in the background return when ready."""
    found = resolved(options)
    if options.daemon:
        return _background(found, options.log_file)
    if options.log_file:
        raise ConfigError("--log-file goes with --daemon; in the foreground the log goes to standard error")
    return _foreground(found)


def _foreground(found: Resolved) -> int:
    from mstar.client.launch import environment
    from mstar.daemon.log import configure
    from mstar.daemon.serve import Daemon

    os.environ.update(environment())
    configure(found.deployment.log_level, found.deployment.log_format)
    progress = ProgressLine()

    def show(news: News) -> None:
        match news:
            case Progress(stage=stage, done=done, total=total) if sys.stderr.isatty() and total:
                progress(stage, done, total)
                if done == total:
                    progress.clear()
            case Ready():
                progress.clear()
                _announce(news, "Ctrl-C")
            case Failed():
                progress.clear()

    return Daemon(found.deployment, news=show).run()


def _announce(ready: Ready, stop: str) -> None:
    print(f"Serving {ready.model}, ready in {ready.seconds:.1f} s")
    if ready.url:
        print(f"  HTTP         {ready.url}/v1")
    print(f"  Unix socket  {ready.socket}")
    print(f"  stop         {stop}", flush=True)


def _background(found: Resolved, log_file: str | None) -> int:
    from mstar.client.errors import EngineFailed
    from mstar.client.launch import launch

    uds = found.deployment.listen.uds
    path = Path(log_file) if log_file else Path(f"{uds}.log") if uds else default_log(os.environ)
    log = _open_log(path)
    line = ProgressLine()

    def show(progress: Progress) -> None:
        stage = progress.stage if progress.actor == "daemon" else f"{progress.actor} {progress.stage}"
        line(stage, progress.done, progress.total)

    try:
        ready = launch(Launch(found.deployment, found.sources), log=log, progress=show).ready
    except EngineFailed as error:
        line.clear()
        print(f"mstar serve: {error} (log: {path})", file=sys.stderr)
        return 1
    except BaseException:
        line.clear()
        raise
    finally:
        os.close(log)
    line.clear()
    stop = f"{_command()} stop"
    _announce(ready, f"{stop} --uds {ready.socket}" if uds else stop)
    print(f"  log          {path}", flush=True)
    return 0


def _command() -> str:
    """What to type for this mstar: its name where the shell finds it, else the path beside its Python."""
    found = shutil.which("mstar")
    here = Path(sys.executable).with_name("mstar")
    return "mstar" if (found and Path(found) == here) or not here.exists() else str(here)


def _open_log(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the log file {path} cannot be written: {error.strerror}; choose another one with --log-file"
        ) from error
