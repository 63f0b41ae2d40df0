"""`mstar generate`: continue a prompt."""

from __future__ import annotations

import argparse
import sys

from mstar.cli.sampling import add_sampling, params_of
from mstar.cli.target import add_target, target_of
from mstar.client.sync import Client

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, which server, sampling, and --json."""
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads standard input")
    parser.add_argument("--json", action="store_true", help="print the whole result as one JSON object")
    add_target(parser)
    add_sampling(parser)


def run(options: argparse.Namespace) -> int:
    """Print the continuation as it is generated."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with Client(target_of(options), api_key=options.api_key) as client:
        if options.json:
            import msgspec

            result = client.generate(prompt, **params_of(options))
            print(msgspec.json.encode(result).decode())
            return 0
        with client.generate(prompt, stream=True, **params_of(options)) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print()
    return 0
