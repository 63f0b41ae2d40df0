"""Multiplications give the same values however the weight lies."""

from __future__ import annotations

import pytest
import torch

from mstar.distributed import matmul
from mstar.distributed.matmul import Layout, lay_out
from mstar.distributed.memory import huge_empty, keep_freed_memory


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 16, 200])
@pytest.mark.parametrize("shape", [(96, 64), (2304, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layouts_agree(dtype: torch.dtype, shape: tuple[int, int], rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    x = torch.randn(rows, shape[1], generator=generator).to(dtype)
    added = torch.randn(shape[0], generator=generator).to(dtype) if bias else None
    exact = x.double() @ weight.double().t() + (0 if added is None else added.double())
    for layout in Layout:
        with torch.inference_mode():
            out = lay_out(weight, added, layout).multiply(x)
        assert out.dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=0)


def test_without_native_kernels_the_plain_weight_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "packs", lambda dtype: False)
    assert lay_out(torch.ones(4, 4, dtype=torch.bfloat16), None, Layout.COLUMNS_AND_BLOCKS).reads_plain
    monkeypatch.undo()
    assert not lay_out(torch.ones(4, 4), None, Layout.COLUMNS).reads_plain


def test_a_huge_tensor_is_zero_aligned_and_writable() -> None:
    tensor = huge_empty((3, 1000, 1000), torch.float32)
    assert tensor.data_ptr() % (2 << 20) == 0
    assert not tensor.any()
    tensor.fill_(2.0)
    assert float(tensor.sum()) == 6e6
    assert huge_empty((0, 5), torch.float32).shape == (0, 5)


def test_glibc_keeps_freed_memory() -> None:
    assert keep_freed_memory()
