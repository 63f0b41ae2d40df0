"""Which server a command means: flags shared by the commands that talk to one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mstar.config.paths import default_socket

__all__ = ["NoServer", "add_target", "socket_of", "target_of"]


class NoServer(Exception):
    """No server runs where one was looked for."""


def add_target(parser: argparse.ArgumentParser, *, http: bool = True) -> None:
    """Add --uds, and --url and --api-key for commands that may also talk HTTP."""
    parser.add_argument(
        "--uds", metavar="PATH", help="Unix socket of the server; by default $MSTAR_UDS, else this user's own"
    )
    if http:
        parser.add_argument("--url", metavar="URL", help="talk HTTP to this server, such as http://host:8000")
        parser.add_argument("--api-key", metavar="KEY", help="key for --url")


def socket_of(options: argparse.Namespace) -> Path:
    """The Unix socket that the flags and the environment mean."""
    given = options.uds or os.environ.get("MSTAR_UDS")
    return Path(given) if given else default_socket(os.environ)


def target_of(options: argparse.Namespace) -> str | None:
    """A target for mstar.Client."""
    if options.url:
        return str(options.url)
    return options.uds or os.environ.get("MSTAR_UDS") or None
