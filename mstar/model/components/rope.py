"""Rotary position embedding, halves of a head turned against each other."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mstar.model.spec import ModelSpec, RopeScaling

__all__ = ["RotaryTable", "Rotation", "inverse_frequencies"]


class Rotation(NamedTuple):
    """Cosines and sines of a batch's positions, [T, 1, head_dim / 2] each."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> None:
        """Rotate x [T, heads, head_dim] in place: element i with element i + head_dim / 2 (Su et al.
        2021)."""
        first, second = x.chunk(2, dim=-1)
        turned = first * self.cos
        turned.addcmul_(second, self.sin, value=-1)
        second.mul_(self.cos).addcmul_(first, self.sin)
        first.copy_(turned)


class RotaryTable:
    """Cosines and sines of every position up to `max_position`, float32 angles rounded once to `dtype`."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(spec.max_position, dtype=torch.float32), inverse_frequencies(spec))
        self._cos = angles.cos().to(device, dtype)
        self._sin = angles.sin().to(device, dtype)

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of positions int64 [T]."""
        return Rotation(
            self._cos.index_select(0, positions).unsqueeze_(1),
            self._sin.index_select(0, positions).unsqueeze_(1),
        )


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """theta^(-2i / head_dim), float32 [head_dim / 2], scaled where the spec says so."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    return frequencies if spec.rope_scaling is None else _llama3(frequencies, spec.rope_scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: wavelengths beyond original / low are divided by factor, those below original /
    high stay, between them the two are blended linearly in original / wavelength.
    """
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
