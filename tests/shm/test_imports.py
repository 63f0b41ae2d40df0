"""The floor: what this room may import."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import shm

ALLOWED = {"shm", "numpy", "msgspec", "posix_ipc", "typing_extensions"} | sys.stdlib_module_names
FORBIDDEN = {"asyncio", "pickle"}


def test_the_room_imports_no_event_loop_no_pickle_and_nothing_of_ours() -> None:
    for path in Path(shm.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                root = name.split(".")[0]
                assert root in ALLOWED, f"{path.name} imports {name}"
                assert root not in FORBIDDEN, f"{path.name} imports {name}"
