"""`mstar status`: what a running server does."""

from __future__ import annotations

import argparse
from typing import Any

from mstar.cli.table import print_table
from mstar.cli.target import add_target, target_of
from mstar.client.sync import Client

__all__ = ["add_arguments", "run"]

# Longest a server may take to answer, in seconds.
PATIENCE = 10.0
_OF_PAGES = ("pages_total", "pages_free", "pages_cached", "evicted", "page_refusals", "preempted", "refused")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, and --json."""
    add_target(parser)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the figures; exit code 1 when no server answers."""
    with Client(target_of(options), api_key=options.api_key, timeout=PATIENCE) as client:
        status = client.status()
    if options.json:
        import json

        print(json.dumps(status, indent=2))
    else:
        _show(status)
    return 0


def _show(status: dict[str, Any]) -> None:
    daemon = status.get("daemon") or status
    print(f"{daemon.get('model')}: {daemon.get('state')}, up {_duration(daemon.get('uptime_seconds', 0))}")
    for name in ("url", "socket", "pid", "version"):
        if daemon.get(name):
            print(f"  {name:8} {daemon[name]}")
    head = ("actor", "pid", "state", "stage", "restarts", "step", "beat")
    rows = [
        (
            actor["actor"],
            actor["pid"],
            actor["state"],
            actor["stage"] or "-",
            actor["restarts"],
            actor["step"],
            "-" if actor["beat_age"] is None else f"{actor['beat_age']:.1f} s ago",
        )
        for actor in daemon.get("actors") or ()
    ]
    if rows:
        print()
        print_table([head, *rows], indent="  ")
    _section("requests", status.get("requests") or {})
    ranks = status.get("ranks") or {}
    _pages(ranks)
    for rank, figures in ranks.items():
        _section(rank, {name: value for name, value in figures.items() if name not in _OF_PAGES})


def _pages(ranks: dict[str, dict[str, Any]]) -> None:
    """A line a rank: its KV pages, which add up, and what it did about those that it lacked."""
    rows = []
    for rank, figures in ranks.items():
        total, free, cached, *counts = (figures.get(name, 0) for name in _OF_PAGES)
        rows.append((rank, total, free, cached, total - free - cached, *counts))
    if rows:
        print()
        print_table([("pages", "total", "free", "cached", "held", *_OF_PAGES[3:]), *rows], indent="  ")


def _section(title: str, figures: dict[str, Any]) -> None:
    rows = [(name.replace("_", " "), _figure(value)) for name, value in figures.items()]
    if rows:
        print(f"\n  {title}")
        print_table(rows, indent="    ")


def _figure(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "none"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
