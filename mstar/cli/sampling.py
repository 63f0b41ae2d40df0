"""Flags of `chat` and `generate` that become fields of the request."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_sampling", "params_of"]

_FIELDS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "most tokens of the answer"),
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "nucleus sampling"),
    ("top_k", int, "sample among the k likeliest tokens"),
    ("seed", int, "the same seed gives the same answer"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add --model, --max-tokens, --temperature, --top-p, --top-k, --seed and --stop."""
    parser.add_argument("--model", help="name of the model, where the server has several")
    for name, kind, text in _FIELDS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the answer here; may be repeated"
    )


def params_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given."""
    names = ("model", "stop", *(name for name, _, _ in _FIELDS))
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}
