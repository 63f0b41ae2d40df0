"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.distributed.layers import TensorSource, check_shape

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019); held whole by
    every rank."""

    weight: Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self._shape = (size,)
        self._eps = eps
        self._root_eps: Tensor | None = None

    def load(self, part: str, kind: str, source: TensorSource) -> None:
        """Read the weight; WrongShape where the checkpoint's differs."""
        check_shape(source, self._shape)
        self.weight.copy_(source.read(slice(None)))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return functional.rms_norm(x, self._shape, self.weight, self._eps)
        # The library's own is a chain of eight operations on a CPU; these five take two thirds of its time.
        # hypot(|x| / sqrt(n), sqrt(eps)) = sqrt(mean(x^2) + eps)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(self._shape[0] ** -0.5)
        if self._root_eps is None:
            self._root_eps = torch.tensor(self._eps**0.5)
        return x.div(size.hypot_(self._root_eps)).mul_(self.weight)
