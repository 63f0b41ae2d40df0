"""`mstar pull`: fetch a model into the cache."""

from __future__ import annotations

import argparse

from mstar.cli.table import ProgressLine

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model."""
    parser.add_argument(
        "model", metavar="MODEL", help="a registry name, a hub id, or a GGUF file to be converted"
    )


def run(options: argparse.Namespace) -> int:
    """Fetch and convert what is missing; print where the model lies."""
    from mstar.model.files import resolve

    line = ProgressLine()
    try:
        files = resolve(options.model, progress=line)
    finally:
        line.clear()
    print(files.directory)
    return 0
