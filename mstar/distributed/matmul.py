"""How a weight lies in memory for the multiplications it takes part in.

Measured on two cores with AVX2, float32, one thread, [in 576] x [out], microseconds per 1000 outputs (rows
as in the checkpoint / column after column / oneDNN's blocks): 1 row of input 180 / 115 / 165, 2 rows 375 /
195 / 180, 16 rows 540 / 460 / 395 where out is 3072, 440 / 390 / 415 where it is 960, 128 rows 2150 / 2150
/ 2180.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from mstar.distributed.memory import collapse, huge_empty

__all__ = ["LaidOut", "Layout", "Multiply", "lay_out", "packs"]

Multiply = Callable[[Tensor], Tensor]

_WIDE = 2048
_MANY_ROWS = 128


class Layout(Enum):
    """PLAIN: as in the checkpoint. COLUMNS: column after column, on huge pages: the fastest for a single
    row and for narrow layers, the same memory. COLUMNS_AND_BLOCKS: beside that, wide layers as oneDNN's
    blocks, which are up to twice as fast for 2 to 127 rows; 60 % more memory.
    """

    PLAIN = "plain"
    COLUMNS = "columns"
    COLUMNS_AND_BLOCKS = "columns+blocks"


class LaidOut(NamedTuple):
    """A multiplication x [T, in] -> x W^T + b [T, out], and whether it still reads the plain weight."""

    multiply: Multiply
    reads_plain: bool


def lay_out(weight: Tensor, bias: Tensor | None, layout: Layout) -> LaidOut:
    """The multiplication with weight [out, in] in `layout`, as far as the processor has kernels for its
    dtype."""
    if layout is Layout.PLAIN or weight.device.type != "cpu":
        return LaidOut(lambda x: functional.linear(x, weight, bias), reads_plain=True)
    if not packs(weight.dtype):
        return LaidOut(lambda x: _widened(x, weight, bias), reads_plain=True)
    if weight.dtype != torch.float32:
        return LaidOut(_blocks(weight, bias), reads_plain=False)
    by_columns = _columns(weight, bias)
    if layout is Layout.COLUMNS or weight.shape[0] < _WIDE:
        return LaidOut(by_columns, reads_plain=False)
    by_blocks = _blocks(weight, bias)
    return LaidOut(
        lambda x: by_blocks(x) if 1 < x.shape[0] < _MANY_ROWS else by_columns(x), reads_plain=False
    )


def packs(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies blocks of `dtype` natively."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _columns(weight: Tensor, bias: Tensor | None) -> Multiply:
    columns = huge_empty((weight.shape[1], weight.shape[0]), weight.dtype)
    columns.copy_(weight.t())
    if bias is None:
        return lambda x: torch.mm(x, columns)
    return lambda x: torch.addmm(bias, x, columns)


def _blocks(weight: Tensor, bias: Tensor | None) -> Multiply:
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    collapse(int(torch.ops.mkldnn.data_ptr(blocks)), int(torch.ops.mkldnn._nbytes(blocks)))
    pointwise = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: cast(Tensor, pointwise(x, blocks, bias, "none", [], ""))


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Without native kernels the library multiplies half precision at 10 GFLOP/s a core, but reads a single
    # row's weights at full speed: widening the weight each time costs less from two rows on.
    if x.shape[0] == 1:
        return functional.linear(x, weight, bias)
    wide = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(weight.dtype)
