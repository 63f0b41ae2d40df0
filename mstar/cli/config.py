"""`mstar config`: the resolved configuration."""

from __future__ import annotations

import argparse

from mstar.cli.settings import add_settings, resolved
from mstar.cli.table import print_table
from mstar.config.describe import describe

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings, and --json."""
    add_settings(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object: path to value and source")


def run(options: argparse.Namespace) -> int:
    """Print every setting, its value and where the value came from."""
    found = resolved(options)
    rows = describe(found.deployment, found.sources)
    if options.json:
        import json

        print(
            json.dumps({path: {"value": value, "source": source} for path, value, source in rows}, indent=2)
        )
    else:
        print_table([("setting", "value", "from"), *rows])
    return 0
