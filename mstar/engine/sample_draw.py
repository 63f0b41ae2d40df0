"""From logits to a token: weights, the filters' threshold, and the inverse CDF. Pure functions on rows.

Knows no request, slot or seed. Every row is computed from its own logits and parameters alone.

Weights are relative to the largest logit, w = exp((logit - max) / temperature), so the largest is 1.
Tokens lighter than 2^-99 of the largest are never drawn; together they weigh less than 2^-80.

Every filter then is a threshold on w, and a token that ties with the last one kept is kept as well:

- top-k: the k-th largest weight;
- top-p: the smallest weight of the shortest run of heaviest tokens that holds ``top_p`` of what top-k left;
- min-p: ``min_p`` itself, for the largest weight is 1.

Sums of weights are made in float32 inside a block of 64 tokens and in float64 above it: a
probability is right to about 1e-6 of itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BLOCK", "LIGHTEST", "RowParameters", "argmax", "draw", "padded", "threshold", "weigh"]

BLOCK = 64  # tokens a block: a power of two; 64 was the fastest of 16 to 128 on AVX2
LIGHTEST = 2.0**-99
_LOG2_LIGHTEST = -100.0  # below LIGHTEST, and far from float32's subnormals, which cost 50 times as much


class RowParameters(NamedTuple):
    """Columns of R sampled rows, float64 [R] each. ``top_k`` 0 and ``top_p`` 1 are off."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


def padded(vocab_size: int) -> int:
    """``vocab_size`` rounded up to whole blocks."""
    return -(-vocab_size // BLOCK) * BLOCK


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value and its lowest id of each row of float32 [R, whole blocks], contiguous.

    Returns float32 [R] and int64 [R]. A row with a NaN gives NaN. In two levels, because only the
    maximum of a block is vectorised on a CPU.
    """
    blocks = logits.view(logits.shape[0], -1, BLOCK)
    block = blocks.amax(-1).argmax(-1)
    value, inner = _take_block(logits, block).max(-1)
    return value, block * BLOCK + inner


def weigh(logits: Tensor, largest: Tensor, temperature: Tensor, out: Tensor) -> Tensor:
    """Weights, in (0, 1], of ``logits`` float32 [R, n] into ``out``; ``largest`` and ``temperature`` [R]."""
    torch.sub(logits, largest[:, None], out=out)
    scale = (math.log2(math.e) / temperature).clamp_(max=3e38).to(torch.float32)
    return out.mul_(scale[:, None]).clamp_(min=_LOG2_LIGHTEST).exp2_()


def threshold(weights: Tensor, rows: RowParameters) -> Tensor:
    """The lightest weight kept by top-k, then top-p, of each row of float32 [R, whole blocks]: float32 [R].

    On a CPU a row sorts only what its filters can reach; elsewhere all rows are sorted at once, which needs
    no answer from the device.
    """
    if weights.device.type != "cpu":
        return _cut_sorted(weights.sort(-1, descending=True).values, rows)
    limits = zip(weights.numpy(), rows.top_k.tolist(), rows.top_p.tolist(), strict=True)
    return torch.tensor([_cut_row(row, int(top_k), top_p) for row, top_k, top_p in limits])


def _cut_row(weights: NDArray[np.float32], top_k: int, top_p: float) -> float:
    if top_k:
        lightest = np.partition(weights, -top_k)[-top_k]
        if top_p >= 1:
            return float(lightest)
        kept = weights[weights >= lightest]
        total = kept.sum(dtype=np.float64)
    else:
        # What is lighter than this, even if it were all the vocabulary, weighs too little to be reached.
        total = weights.sum(dtype=np.float32)
        kept = weights[weights >= 0.99 * (1 - top_p) * total / len(weights)]
    if not len(kept):
        return 0.0  # the row holds NaN and is refused
    kept = np.sort(kept)[::-1]
    mass = np.cumsum(kept, dtype=np.float64)
    return float(kept[min(np.searchsorted(mass, top_p * total), len(kept) - 1)])


def _cut_sorted(heaviest: Tensor, rows: RowParameters) -> Tensor:
    by_k, by_p = rows.top_k > 0, rows.top_p < 1
    last = heaviest.shape[1] - 1
    place = (rows.top_k.long() - 1).clamp(0, last)[:, None]
    kth = torch.where(by_k, heaviest.gather(1, place).squeeze(1), 0.0)
    mass = (heaviest * heaviest.ge(kth[:, None])).cumsum(-1, dtype=torch.float64)
    reached = mass.lt((rows.top_p * mass[:, -1])[:, None]).sum(-1, keepdim=True).clamp_(max=last)
    return torch.maximum(kth, torch.where(by_p, heaviest.gather(1, reached).squeeze(1), 0.0))


def draw(weights: Tensor, cut: Tensor, uniform: Tensor) -> Tensor:
    """The token where the CDF over the kept tokens, in vocabulary order, passes ``uniform``: int64 [R].

    ``weights`` float32 [R, whole blocks], the largest of each row 1, are overwritten; ``cut`` float32 [R] in
    (0, 1] is the lightest weight kept; ``uniform`` float64 [R] in [0, 1). A weight below the cut is
    never drawn.
    """
    weights.mul_(torch.ge(weights, cut[:, None], out=torch.empty_like(weights)))
    sums = weights.view(weights.shape[0], -1, BLOCK).sum(-1)
    block, within = _invert(sums, uniform)
    inner, _ = _invert(_take_block(weights, block), within)
    return block * BLOCK + inner


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The index whose share of the CDF of [R, n] holds ``uniform``, and how far into that share it lies."""
    border = weights.cumsum(-1, dtype=torch.float64)
    total = border[:, -1:]
    # Rounding must not reach the total: the index would lie behind the last token of any weight.
    target = torch.minimum(uniform[:, None] * total, total * (1 - 2.0**-52))
    index = border.le(target).sum(-1, keepdim=True)
    low = torch.where(index > 0, border.gather(1, (index - 1).clamp_(min=0)), 0.0)
    share = (target - low) / (border.gather(1, index.clamp(max=weights.shape[1] - 1)) - low)
    return index.squeeze(1), share.squeeze(1)


def _take_block(rows: Tensor, block: Tensor) -> Tensor:
    """The values of ``block`` [R] of each row of [R, n]: [R, BLOCK]."""
    count = rows.shape[1] // BLOCK
    first = torch.arange(0, rows.shape[0] * count, count, device=rows.device)
    return rows.view(-1, BLOCK).index_select(0, block + first)
