"""Counter-based random numbers: Philox4x32-10, the same bits in numpy and in torch.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Nothing is
advanced and nothing is stored: the number of a token is a function of who it is drawn for and where.
"""

from __future__ import annotations

from typing import TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["philox4x32", "uniforms"]

# Both are int64 here: torch has no multiplication of unsigned words, and both libraries wrap modulo 2^64.
Words = TypeVar("Words", NDArray[np.int64], Tensor)

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds of Philox4x32 on arrays of 32-bit words held in int64, elementwise.

    Every array has one shape and values in [0, 2^32); so have the four results.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two words may pass 2^63 and wrap: its low and high halves are right all the same.
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


@overload
def uniforms(
    seed: NDArray[np.int64], choice: NDArray[np.int64], node: NDArray[np.int64], position: NDArray[np.int64]
) -> NDArray[np.float64]: ...


@overload
def uniforms(seed: Tensor, choice: Tensor, node: Tensor, position: Tensor) -> Tensor: ...


def uniforms(seed: Words, choice: Words, node: Words, position: Words) -> NDArray[np.float64] | Tensor:
    """One uniform in [0, 1) per element, of 53 bits, keyed by (seed, choice, node, position).

    The arguments are int64 arrays or tensors of one shape; ``choice`` and ``node`` count modulo
    2^32. The result is float64 of that shape, bit for bit the same from numpy and from torch, on
    every device.
    """
    counter = (position & _MASK, (position >> 32) & _MASK, choice & _MASK, node & _MASK)
    w0, w1, _, _ = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    bits = ((w0 >> 5) << 26) | (w1 >> 6)
    if isinstance(bits, Tensor):
        return bits.to(torch.float64) * 2.0**-53
    result: NDArray[np.float64] = np.multiply(bits, 2.0**-53, dtype=np.float64)
    return result
