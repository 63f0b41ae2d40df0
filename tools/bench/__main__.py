"""What there is to measure: `python -m tools.bench` lists every bench with what it says of itself."""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ["benches"]


def benches() -> dict[str, str]:
    """Module name to the first line of its docstring, of every bench that runs with ``python -m``."""
    found = {}
    folder = Path(__file__).parent
    for entry in sorted(folder.iterdir()):
        source = entry / "__init__.py" if (entry / "__main__.py").exists() else entry
        if source.suffix != ".py" or entry.name.startswith("_"):
            continue
        text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        found[f"tools.bench.{entry.stem}"] = text.partition("\n")[0]
    return found


if __name__ == "__main__":
    for name, purpose in benches().items():
        print(f"python -m {name:26} {purpose}")
