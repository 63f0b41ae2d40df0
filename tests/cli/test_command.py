"""`mstar serve --daemon` tells how to stop the server in words that work in the shell that started it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mstar.cli.serve import _command


def test_mstar_is_named_as_this_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "mstar"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert _command() == "mstar"  # installed some other way: there is no better word
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert _command() == str(script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _command() == "mstar"
