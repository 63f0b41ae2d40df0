"""What a family declares: how its network is built, and where each checkpoint tensor belongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from mstar.distributed.group import Group
from mstar.model.api import CausalLM
from mstar.model.spec import ModelSpec

__all__ = ["Family", "Target"]


class Target(NamedTuple):
    """Where a checkpoint tensor goes: the layer's path in the network, the matrix in it, weight or bias."""

    module: str
    part: str
    kind: str


class Family(NamedTuple):
    """`build(spec, group, dtype)` makes the network without values (on the meta device by the caller's
    choice).

    `targets(spec)` lists every checkpoint tensor the network needs; `ignored` are endings of tensor names
    that carry nothing (buffers that are computed).
    """

    build: Callable[[ModelSpec, Group, torch.dtype], CausalLM]
    targets: Callable[[ModelSpec], dict[str, Target]]
    ignored: tuple[str, ...] = ()
