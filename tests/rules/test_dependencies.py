"""What is imported is declared, what is declared is locked."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions

from tests.rules.sources import PACKAGES, imports, python_files, text

OURS = {*PACKAGES, "tests"}
# Not installed everywhere, so that their metadata cannot be asked.
DISTRIBUTIONS = {"flashinfer": ["flashinfer-python"], "triton": ["triton"], "llama_cpp": ["llama-cpp-python"]}


def canonical(requirement: str) -> str:
    name = re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    project = tomllib.loads(text("pyproject.toml"))["project"]
    listed = [*project["dependencies"], *(r for e in extras for r in project["optional-dependencies"][e])]
    return {canonical(requirement) for requirement in listed}


def undeclared(folders: Iterable[str], allowed: set[str]) -> list[str]:
    known = {**packages_distributions(), **DISTRIBUTIONS}
    found = set()
    for file in python_files(*folders):
        for module, line in imports(file):
            top = module.partition(".")[0]
            if top in sys.stdlib_module_names or top in OURS:
                continue
            if not {canonical(name) for name in known.get(top, [top])} & allowed:
                found.add(f"{file}:{line} imports {top}")
    return sorted(found)


def test_the_engine_imports_what_it_declares() -> None:
    assert undeclared(("shm", "actors", "mstar"), declared("uvloop", "cuda", "plot")) == []


def test_tools_and_tests_import_what_the_extras_declare() -> None:
    assert undeclared(("tools", "tests"), declared("uvloop", "cuda", "plot", "bench", "test")) == []


def test_what_is_declared_is_locked() -> None:
    lines = text("constraints.txt").splitlines()
    pins = {canonical(line) for line in lines if "==" in line and not line.startswith("#")}
    assert declared("uvloop", "cuda", "plot", "bench", "test") - pins == {"torch"}
