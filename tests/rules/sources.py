"""The files that the rules look at: what git tracks, or what lies there where there is no git."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("shm", "actors", "mstar", "tools")
# Rooms that decide: fed with events and time, no clock and no device of their own.
DECIDING = (
    "mstar/messages/",
    "mstar/config/schema.py",
    "mstar/graph/",
    "mstar/streaming/",
    "mstar/validation/",
    "mstar/conductor/",
    *(
        f"mstar/worker/{name}.py"
        for name in (
            *("scheduler", "waiting", "prefill", "decodes", "batch", "budget"),
            *("limits", "ledger", "prefix", "pipeline", "slots"),
            *("node", "entry", "departures", "filing", "late", "outcome", "leader", "follower"),
        )
    ),
    *(f"mstar/engine/{name}.py" for name in ("chunking", "stop", "slot_table")),
    *(f"mstar/gateway/{name}.py" for name in ("book", "text")),
)


@cache
def tracked() -> tuple[str, ...]:
    """Paths relative to the root, new files that nobody ignores included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return tuple(sorted({name for name in done.stdout.splitlines() if (ROOT / name).is_file()}))
    hidden = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return tuple(
        sorted(str(p) for p in hidden if not p.parts[0].startswith(".") and "__pycache__" not in p.parts)
    )


def python_files(*under: str) -> Iterator[str]:
    """Python files below these folders."""
    folders = tuple(f"{folder}/" for folder in under)
    return (name for name in tracked() if name.endswith(".py") and name.startswith(folders))


@cache
def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(text(name), name)


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a file, with the dotted name of what is called as it is written there."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imports(name: str) -> Iterator[tuple[str, int]]:
    """Every imported module of a file ('a.b' also for `from a import b`) and its line."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
