"""`mstar chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mstar.cli.sampling import add_sampling, params_of
from mstar.cli.target import add_target, target_of
from mstar.client.errors import BadRequest, ClientError
from mstar.client.sync import Client

__all__ = ["add_arguments", "run"]

HELP = "Ctrl-D or /exit leaves, /clear forgets the conversation, Ctrl-C cuts an answer short"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--once, --system, which server, sampling."""
    parser.add_argument(
        "--once", metavar="TEXT", help="answer this one message and exit; - reads standard input"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_target(parser)
    add_sampling(parser)


def run(options: argparse.Namespace) -> int:
    """Talk until the input ends; with --once answer one message."""
    opening = [{"role": "system", "content": options.system}] if options.system else []
    with Client(target_of(options), api_key=options.api_key) as client:
        if options.once is not None:
            text = sys.stdin.read() if options.once == "-" else options.once
            _answer(client, [*opening, {"role": "user", "content": text}], params_of(options))
            return 0
        name = client.models()[0].id
        if sys.stdin.isatty():
            import readline  # noqa: F401 - gives input() its history and editing

            print(f"{name}: {HELP}")
        return _converse(client, opening, params_of(options))


def _converse(client: Client, opening: list[dict[str, str]], params: dict[str, Any]) -> int:
    messages = list(opening)
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if text == "/exit":
            return 0
        if text == "/clear":
            messages = list(opening)
        elif text.startswith("/"):
            print(HELP)
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": _answer(client, messages, params)})
            except BadRequest as error:
                messages.pop()
                print(f"\nmstar chat: {error}", file=sys.stderr)
            except ClientError as error:
                messages.pop()
                print(f"\nmstar chat: {error}", file=sys.stderr)
                if not sys.stdin.isatty():
                    return 1


def _answer(client: Client, messages: list[dict[str, str]], params: dict[str, Any]) -> str:
    """Print an answer as it comes; Ctrl-C ends it early. Returns what was printed."""
    parts: list[str] = []
    with client.chat(messages, stream=True, **params) as stream:
        try:
            for chunk in stream:
                parts.append(chunk.text)
                print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            stream.cancel()
    print()
    return "".join(parts)
