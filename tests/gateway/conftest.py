"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mstar.model.tokenizer import Tokenizer
from tests.gateway.harness import Gateway, serving


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.fixture
async def gateway(tiny_model_dir: Path, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway whose rank says the same text for ever."""
    async with serving(tiny_model_dir, tmp_path) as running:
        yield running
