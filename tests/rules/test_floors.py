"""Who may import whom, and who stays light."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from tests.rules.sources import ROOT, python_files

# Whole folders, file by file, and single files of folders that hold both kinds.
LIGHT_FOLDERS = (
    "shm",
    "actors",
    *(f"mstar/{room}" for room in ("cli", "client", "messages", "config", "graph", "streaming", "conductor")),
    "mstar/validation",
)
LIGHT_MODULES = (
    "mstar",
    *(
        f"mstar.worker.{name}"
        for name in ("scheduler", "batch", "budget", "ledger", "prefix", "pipeline", "slots")
    ),
    "mstar.engine.chunking",
    "mstar.model.files",
    "mstar.model.spec",
    "mstar.model.tokenizer",
)
HEAVY = ("torch", "transformers", "triton", "scipy", "matplotlib", "IPython")

PROBE = """
import importlib, sys
heavy = {heavy!r}
for name in {names!r}:
    importlib.import_module(name)
    found = [h for h in heavy if h in sys.modules]
    if found:
        sys.exit(f"{{name}} imports {{found[0]}}")
"""


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def light_modules() -> list[str]:
    files = [name for name in python_files(*LIGHT_FOLDERS) if not name.endswith("__main__.py")]
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]
    return [*modules, *(name for name in LIGHT_MODULES if exists(name))]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr.strip()


def test_what_decides_and_what_people_type_imports_no_torch() -> None:
    names = light_modules()
    assert len(names) > 30
    assert run(PROBE.format(heavy=HEAVY, names=names)) == ""


def test_the_probe_for_heavy_imports_sees_one() -> None:
    assert run(PROBE.format(heavy=("decimal",), names=["decimal"])) == "decimal imports decimal"


def test_the_floors_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
