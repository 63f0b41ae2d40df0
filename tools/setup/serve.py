"""`make serve`, as a person would type it: fetch a model, start a daemon, stream one answer, leave it on."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

QUESTION = "What is the capital of France? Answer in one sentence."
OPENING = "The capital of France is"
PLAIN = ("--temperature", "0", "--max-tokens", "60")
MSTAR = (sys.executable, "-m", "mstar.cli.main")


class ServeError(Exception):
    """The server could not be shown; the message is one sentence, or empty where mstar told it already."""


def mstar(*arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command of mstar; its output is this terminal's unless `quiet`."""
    pipe = subprocess.PIPE if quiet else None
    return subprocess.run(
        [*MSTAR, *arguments], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, check=False
    )


def running(where: Sequence[str]) -> dict[str, Any] | None:
    """What a daemon on that socket says of itself; None where none answers."""
    done = mstar("status", "--json", *where, quiet=True)
    if done.returncode:
        return None
    status: dict[str, Any] = json.loads(done.stdout)
    daemon: dict[str, Any] = status.get("daemon", status)
    return daemon


def _same(model: str, port: int, daemon: dict[str, Any]) -> bool:
    url = daemon.get("url") or f":{port}"
    return daemon.get("model") in (model, Path(model).name, Path(model).stem) and url.endswith(f":{port}")


def serve(model: str, port: int, extra: Sequence[str], where: Sequence[str]) -> str:
    """Start the daemon, or find the same one running. Returns how to stop it. Raises ServeError."""
    stop = " ".join(["mstar stop", *where]) if where else "make stop"
    daemon = running(where)
    if daemon is not None:
        if not _same(model, port, daemon):
            raise ServeError(
                f"a server with {daemon.get('model')} at {daemon.get('url')} has this socket: "
                f"{stop}, or give this one another with ARGS='--uds PATH'."
            )
        print(f"Serving {daemon['model']} already, at {daemon.get('url')}/v1", flush=True)
        return stop
    if mstar("pull", model).returncode:
        raise ServeError("")
    if mstar("serve", model, "--port", str(port), "--daemon", *extra).returncode:
        raise ServeError("")
    return stop


def show(where: Sequence[str]) -> None:
    """Stream one answer to the terminal; a model without a chat template continues a text."""
    print(f"\n> {QUESTION}", flush=True)
    if mstar("chat", "--once", QUESTION, *PLAIN, *where).returncode == 0:
        return
    print(f"\n> {OPENING}", flush=True)
    if mstar("generate", OPENING, *PLAIN, *where).returncode:
        raise ServeError("the server is up and did not answer; its log tells why.")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make serve", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", required=True)
    parser.add_argument("--uds", help=argparse.SUPPRESS)
    options, extra = parser.parse_known_args()
    extra = [word for word in extra if word != "--"]
    where = ["--uds", options.uds] if options.uds else []
    try:
        if not options.port.isdecimal():
            raise ServeError(f"PORT is {options.port!r}; allowed is a whole number.")
        stop = serve(options.model, int(options.port), [*extra, *where], where)
        show(where)
    except ServeError as error:
        if str(error):
            print(f"serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nserve: interrupted", file=sys.stderr)
        return 130
    python = Path(sys.executable).parent
    print(f"\nIt keeps serving. Talk to it with {python}/mstar chat, stop it with {stop}.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
