"""The sampler's meaning in plain float64 loops: slow, and written to be compared with."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mstar.messages.request import Sampling


def processed(
    logits: NDArray[np.float64],
    sampling: Sampling,
    prompt: list[int],
    output: list[int],
    forbidden: tuple[int, ...] = (),
) -> NDArray[np.float64]:
    """Bias, penalties and forbidden ids, in the documented order."""
    result = logits.astype(np.float64).copy()
    for token, value in sampling.logit_bias:
        result[token] += value
    for token in set(prompt) | set(output):
        result[token] *= sampling.repetition_penalty ** (-1 if result[token] > 0 else 1)
    for token in set(output):
        result[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    result[list(forbidden)] = -math.inf
    return result


def probabilities(logits: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """The distribution that is drawn from after temperature, top-k, top-p and min-p."""
    share = _softmax(logits / sampling.temperature)
    if 0 < sampling.top_k < len(share):
        share = _keep(share, share >= np.sort(share)[-sampling.top_k])
    if sampling.top_p < 1:
        order = np.argsort(-share, kind="stable")
        before = np.cumsum(share[order]) - share[order]
        lightest = share[order][before < sampling.top_p].min()
        share = _keep(share, share >= lightest)
    return _keep(share, share >= sampling.min_p * share.max())


def token_at(share: NDArray[np.float64], uniform: float) -> int:
    """The inverse CDF in vocabulary order."""
    return int(np.searchsorted(np.cumsum(share), uniform, side="right"))


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _keep(share: NDArray[np.float64], kept: NDArray[np.bool_]) -> NDArray[np.float64]:
    left = np.where(kept, share, 0.0)
    return left / left.sum()
