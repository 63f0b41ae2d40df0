"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from mstar.distributed.group import Group
from mstar.distributed.layers import ColumnLinear, Part, RowLinear
from mstar.model.spec import ModelSpec

__all__ = ["GatedMLP"]


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), gate and up stacked in one multiplication."""

    def __init__(self, spec: ModelSpec, group: Group) -> None:
        super().__init__()
        shard = group.shard
        part = Part.even(spec.ffn_size, shard, "intermediate_size")
        self.gate_up = ColumnLinear(spec.hidden_size, {"gate": part, "up": part}, bias=spec.mlp_bias)
        self.down = RowLinear(spec.ffn_size, spec.hidden_size, shard, bias=spec.mlp_bias)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self._group.all_reduce(self.down(functional.silu(gate).mul_(up)))
