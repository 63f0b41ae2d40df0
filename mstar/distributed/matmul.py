"""How a weight lies in memory for the multiplications it takes part in on a CPU."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from enum import Enum
from typing import cast

import torch
from torch import Tensor

__all__ = ["Layout", "Multiply", "huge_empty", "lay_out"]

Multiply = Callable[[Tensor], Tensor]

_HUGE_PAGE = 2 << 20


class Layout(Enum):
    """PLAIN: rows as in the checkpoint, the library's own choice.

    PACKED: blocks as oneDNN's kernels walk them. PACKED_AND_COLUMNS: packed for several rows of input, and
    a second copy, column after column, for a single row: twice the memory.
    """

    PLAIN = "plain"
    PACKED = "packed"
    PACKED_AND_COLUMNS = "packed+columns"


def lay_out(weight: Tensor, bias: Tensor | None, layout: Layout) -> Multiply | None:
    """x [T, in] -> x W^T + b [T, out] for weight [out, in] in `layout`; None where the plain one is best."""
    if layout is Layout.PLAIN or weight.device.type != "cpu":
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def many(x: Tensor) -> Tensor:
        return cast(Tensor, pointwise(x, packed, bias, "none", [], ""))

    if layout is Layout.PACKED:
        return many
    columns = huge_empty((weight.shape[1], weight.shape[0]), weight.dtype)
    columns.copy_(weight.t())

    def either(x: Tensor) -> Tensor:
        if x.shape[0] != 1:
            return many(x)
        return torch.mm(x, columns) if bias is None else torch.addmm(bias, x, columns)

    return either


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor on 2 MiB pages where the kernel has them.

    Streaming 540 MB of weights from 4 KiB pages takes 20 % longer (address translation).
    """
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    region = mmap.mmap(-1, count * dtype.itemsize + _HUGE_PAGE)
    region.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(region, dtype=torch.uint8)
    start = -raw.data_ptr() % _HUGE_PAGE
    return raw[start : start + count * dtype.itemsize].view(dtype).view(shape)
