"""Spawning a daemon and following its start, for programs and for the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from mstar.client.errors import EngineFailed
from mstar.config.launch import Failed, Launch, Progress, Ready, decode_news

__all__ = ["Started", "launch"]


class Started(NamedTuple):
    """A daemon that serves. Its process is not a child to be waited for by anybody else."""

    process: subprocess.Popen[bytes]
    ready: Ready


def environment() -> dict[str, str]:
    """This process's environment; a child imports from the working directory only if this process does."""
    env = dict(os.environ)
    if not sys.path or sys.path[0] not in ("", os.getcwd()):
        env["PYTHONSAFEPATH"] = "1"
    return env


def launch(
    order: Launch, *, log: int | None = None, progress: Callable[[Progress], None] | None = None
) -> Started:
    """Start a daemon in a session of its own and wait until it serves.

    ``log`` is the descriptor that takes its output (None discards it). Raises EngineFailed with the
    cause when the start fails. Interrupted (Ctrl-C), it ends the daemon and raises.
    """
    news, news_end = os.pipe()
    output = subprocess.DEVNULL if log is None else log
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "mstar.daemon", "--news", str(news_end)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=(news_end,),
            env=environment(),
        )
    except BaseException:
        os.close(news)
        raise
    finally:
        os.close(news_end)
    try:
        with open(news, "rb") as lines:
            _send(process, msgspec.json.encode(order))
            for line in lines:
                match decode_news(line):
                    case Ready() as ready:
                        return Started(process, ready)
                    case Failed(cause=cause):
                        process.wait()
                        raise EngineFailed(cause)
                    case Progress() as step:
                        if progress is not None:
                            progress(step)
        code = process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise EngineFailed(f"the daemon {how} before it was ready")
    except BaseException:
        if process.poll() is None:
            process.terminate()
            process.wait()
        raise


def _send(process: subprocess.Popen[bytes], order: bytes) -> None:
    assert process.stdin is not None
    try:
        with process.stdin:
            process.stdin.write(order)
    except BrokenPipeError:
        pass  # It has ended; the cause follows from the news or the exit code.
