"""One server for each module that asks for `server`; a test that breaks its server starts its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.helpers.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a window long enough for streams that outlast a test."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position=8192)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder: a Unix socket's path is bounded."""
    path = Path(tempfile.mkdtemp(prefix="mstar-e2e-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    path = Path(tempfile.mkdtemp(prefix="mstar-e2e-"))
    with Server(model, path, "--max-concurrent-requests", 32) as found:
        yield found
    shutil.rmtree(path)
