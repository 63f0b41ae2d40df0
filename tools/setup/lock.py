"""Writes constraints.txt anew from what is installed (`make lock`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# torch's build is chosen by tools/setup; pip is the environment's own.
NOT_LOCKED = {"torch", "pip", "mstar"}


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def merge(old: str, frozen: str) -> str:
    """The new file: the old one's comments, what is frozen, old pins of what is not installed."""
    comments = [line for line in old.splitlines() if line.startswith("#")]
    pins: dict[str, str] = {}
    for line in [*old.splitlines(), *frozen.splitlines()]:
        name, equals, version = line.strip().partition("==")
        if not equals or line.startswith(("#", "-")) or canonical(name) in NOT_LOCKED:
            continue
        pins[canonical(name)] = f"{name}=={version.split('+')[0]}"
    return "\n".join([*comments, *(pins[name] for name in sorted(pins))]) + "\n"


def main() -> int:
    command = [sys.executable, "-m", "pip", "freeze", "--all"]
    frozen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    path = ROOT / "constraints.txt"
    path.write_text(merge(path.read_text(encoding="utf-8"), frozen), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
