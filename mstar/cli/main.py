"""The entry of `mstar`: which command, and how its failures are told."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]

COMMANDS = {
    "serve": "serve a model until told to stop",
    "status": "show what a running server does",
    "stop": "stop a running server, letting open answers finish",
    "chat": "talk with the model of a running server",
    "generate": "continue a prompt",
    "pull": "fetch a model into the cache",
    "config": "show the resolved configuration and where each value came from",
    "simulate": "predict what a workload would see of a deployment",
}
# Failures that are the user's to mend: told in one sentence. Named by text, so that none is imported.
EXPECTED = (
    ("mstar.config.load", "ConfigError"),
    ("mstar.config.paths", "UntrustedFolder"),
    ("mstar.client.errors", "ClientError"),
    ("mstar.model.errors", "ModelError"),
    ("mstar.cli.target", "NoServer"),
)
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """One sentence for a wrong command line, with the nearest flag or command, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"(?:unrecognized arguments: |invalid choice: ')(-{0,2}[\w-]+)", message)
        known = [*self._option_string_actions, *COMMANDS]
        close = difflib.get_close_matches(found[1], known, n=1) if found else []
        hint = f" Did you mean {close[0]}?" if close else ""
        self.exit(MISUSED, f"{self.prog}: {message}.{hint} See {self.prog} --help.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 when it failed, 2 when it was misused, 130 on Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(prog="mstar", description="M*: a serving engine for composite models on one host.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    chosen = parser
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text.capitalize() + ".", allow_abbrev=False)
        if name == wanted:
            module = importlib.import_module(f"mstar.cli.{name}")
            module.add_arguments(sub)
            chosen = sub
            sub.set_defaults(run=module.run)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        chosen.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.version:
        from mstar import __version__

        print(f"mstar {__version__}")
        return 0
    if options.command is None:
        parser.print_help()
        return MISUSED
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away; nothing is left to be told, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if not _expected(error):
            raise
        print(f"mstar {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return MISUSED if type(error).__name__ == "ConfigError" else FAILED


def _expected(error: Exception) -> bool:
    kinds = (getattr(sys.modules[module], name) for module, name in EXPECTED if module in sys.modules)
    return any(isinstance(error, kind) for kind in kinds)


if __name__ == "__main__":
    sys.exit(main())
