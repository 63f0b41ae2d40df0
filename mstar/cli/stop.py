"""`mstar stop`: an orderly end, waited for."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys

from mstar.cli.target import NoServer, add_target, socket_of
from mstar.config.paths import lock_owner

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, and --now."""
    add_target(parser, http=False)
    parser.add_argument("--now", action="store_true", help="do not wait for open answers to finish")


def run(options: argparse.Namespace) -> int:
    """Order the server to stop and wait until it is gone; Ctrl-C hastens it, a second one leaves it alone."""
    socket = socket_of(options)
    pid = lock_owner(socket)
    if pid is None:
        raise NoServer(
            f"no server of this host runs on the Unix socket {socket}; name another one with --uds"
        )
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    try:
        _order(process, signal.SIGTERM)
        if options.now:
            _order(process, signal.SIGINT)
        try:
            _wait(process)
        except KeyboardInterrupt:
            print(
                "\nmstar stop: ending open answers now; Ctrl-C again leaves the server to it", file=sys.stderr
            )
            _order(process, signal.SIGINT)
            _wait(process)
    finally:
        os.close(process)
    print(f"stopped process {pid}")
    return 0


def _order(process: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise NoServer("the server belongs to another user, so it cannot be stopped from here") from error


def _wait(process: int) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll()
