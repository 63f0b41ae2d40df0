"""Log probabilities of the raw model: before penalties, bias, temperature and filters."""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.engine.sample_draw import BLOCK, weigh

__all__ = ["TOP", "raw_logprobs"]

TOP = 20  # OpenAI's limit on top_logprobs


def raw_logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax of float32 [R, whole blocks] at ``tokens`` [R], and the 20 likeliest alternatives.

    Returns float32 [R], ids int64 [R, 20] and float32 [R, 20], from the likeliest, ties by the lowest id;
    a vocabulary of fewer tokens is filled up with id -1 and -inf. A row with a token of -1 gives NaN.
    """
    rows = logits.shape[0]
    largest = logits.amax(-1)
    weights = weigh(logits, largest, torch.ones_like(largest), torch.empty_like(logits))
    total = weights.view(rows, -1, BLOCK).sum(-1).sum(-1, dtype=torch.float64)
    normaliser = (largest + total.log())[:, None]
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None]) - normaliser
    chosen[tokens < 0] = torch.nan
    top = logits.topk(TOP)
    ids, order = top.indices.sort(-1)
    values, order = top.values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    return (
        chosen.squeeze(1).to(torch.float32),
        torch.where(values == -torch.inf, -1, ids),
        (values - normaliser).to(torch.float32),
    )
