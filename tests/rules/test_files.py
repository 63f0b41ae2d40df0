"""What every file of the repository has, and what none contains."""

from __future__ import annotations

import ast
import re

from tests.rules.sources import PACKAGES, ROOT, python_files, text, tracked, tree

# Put together from halves, so that this file is not its own finding.
PRIVATE = ("/wo" + "rk/", "/tmp/pl" + "an", ".." + "/shared", "/root" + "/")
REGISTRIES = (
    *("py" + "pi.org", "python" + "hosted.org", "registry.npm" + "js", "download." + "pytorch.org"),
    *("deb." + "debian.org", "proxy." + "golang.org", "crates" + ".io"),
)
UNFINISHED = re.compile(r"\b(" + "TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
TEXT = (".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".json", ".jinja", ".html", "")


def text_files() -> list[str]:
    return [name for name in tracked() if (ROOT / name).suffix in TEXT]


def test_no_file_speaks_of_places_outside_the_repository() -> None:
    found = [f"{name}: {word}" for name in text_files() for word in PRIVATE if word in text(name)]
    assert not found


def test_no_file_names_the_host_of_a_package_registry() -> None:
    found = [f"{name}: {word}" for name in text_files() for word in REGISTRIES if word in text(name)]
    assert not found


def test_no_file_is_left_unfinished() -> None:
    found = [
        f"{name}:{number}"
        for name in text_files()
        for number, line in enumerate(text(name).splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not found


def test_every_module_says_what_it_is() -> None:
    found = [name for name in python_files(*PACKAGES) if not ast.get_docstring(tree(name))]
    assert not found


def test_every_folder_of_a_package_has_a_paragraph() -> None:
    found = []
    for folder in sorted({name.rpartition("/")[0] for name in python_files("shm", "actors", "mstar")}):
        init = f"{folder}/__init__.py"
        words = (ast.get_docstring(tree(init)) or "").split() if (ROOT / init).exists() else []
        if len(words) < 12:
            found.append(f"{init} has {len(words)} words")
    assert not found


def test_every_module_postpones_its_annotations() -> None:
    found = [
        name
        for name in python_files(*PACKAGES, "tests")
        if not name.endswith("__init__.py") and "from __future__ import annotations" not in text(name)
    ]
    assert not found


def test_no_file_holds_a_second_noun() -> None:
    found = [
        f"{name} has {lines} lines"
        for name in python_files(*PACKAGES)
        if (lines := len(text(name).splitlines())) > 700
    ]
    assert not found


def test_public_functions_have_types() -> None:
    found = [
        f"{name}:{node.lineno} {node.name}"
        for name in python_files("shm", "actors", "mstar")
        for node in ast.walk(tree(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is None
    ]
    assert not found


def test_no_binary_is_large() -> None:
    found = [name for name in tracked() if (ROOT / name).stat().st_size > 2_000_000]
    assert not found
