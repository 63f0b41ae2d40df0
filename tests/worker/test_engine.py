"""Building an engine: what a deployment asks for and the machine does not have is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar.worker.engine import CacheTooLarge, CacheTooSmall
from tests.worker.local_rank import LocalRank


def test_a_cache_that_holds_no_sequence_is_told(tiny_model_dir: Path) -> None:
    with pytest.raises(CacheTooSmall, match="raise --kv-cache-bytes"):
        LocalRank(tiny_model_dir, kv_cache_bytes=1)


def test_a_cache_that_the_machine_does_not_give_is_told(tiny_model_dir: Path) -> None:
    with pytest.raises(CacheTooLarge, match="lower --kv-cache-bytes"):
        LocalRank(tiny_model_dir, kv_cache_bytes=1 << 60)
