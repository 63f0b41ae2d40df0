"""What a CPU runs a model best with. To be measured."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mstar.distributed.matmul import Layout
from mstar.model.spec import ModelSpec

__all__ = ["CpuChoice", "choose_cpu"]


class CpuChoice(NamedTuple):
    dtype: torch.dtype
    threads: int
    layout: Layout


def choose_cpu(spec: ModelSpec) -> CpuChoice:
    return CpuChoice(torch.float32, 1, Layout.COLUMNS_AND_BLOCKS)
