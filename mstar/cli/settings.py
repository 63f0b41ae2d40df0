"""Flags of a deployment, from the table of settings, and their resolution."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from mstar.config.describe import allowed
from mstar.config.load import Resolved, resolve
from mstar.config.options import OPTIONS

__all__ = ["add_settings", "resolved"]


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the positional CONFIG|MODEL, --config and a flag for every setting."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="CONFIG|MODEL",
        help="a deployment file (.yaml), or a model: registry name, directory, GGUF file or hub id",
    )
    parser.add_argument("--config", metavar="FILE", help="a deployment file, whatever its name ends with")
    group = parser.add_argument_group("settings", "each overrides its environment variable, that the file")
    for entry in OPTIONS:
        if not entry.flags:
            continue
        text = f"{entry.help}; {allowed(entry.path)}" if not (entry.negated or entry.switch) else entry.help
        arguments: dict[str, Any] = {"dest": f"setting:{entry.path}", "default": argparse.SUPPRESS}
        arguments["help"] = f"{text} [{entry.variable}]".replace("%", "%%")
        if entry.negated:
            group.add_argument(*entry.flags, action="store_const", const=False, **arguments)
        elif entry.switch:
            group.add_argument(entry.flags[0], action=argparse.BooleanOptionalAction, **arguments)
        else:
            action = "append" if entry.many else "store"
            group.add_argument(*entry.flags, action=action, metavar=entry.metavar, **arguments)


def resolved(options: argparse.Namespace) -> Resolved:
    """The configuration that the command line, the environment and the file mean. Raises ConfigError."""
    flags = {
        name.removeprefix("setting:"): value
        for name, value in vars(options).items()
        if name.startswith("setting:")
    }
    file, target = options.config, options.target
    if target is not None and target.endswith((".yaml", ".yml")) and file is None:
        file = target
    elif target is not None:
        flags.setdefault("model", target)
    found = resolve(Path(file) if file else None, os.environ, flags)
    for name, close in found.mistyped:
        print(f"mstar: the variable {name} has no effect; did you mean {close}?", file=sys.stderr)
    return found
