"""Penalties on tokens that occurred before: counts per slot, prompt and output kept apart.

Knows token counts and nothing of how a token is drawn. The tables are [slots, vocab] on the device and are
allocated when the first sequence that asks for a penalty is bound.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mstar.messages.request import Sampling

__all__ = ["Penalties", "has_penalties"]


def has_penalties(sampling: Sampling) -> bool:
    """Whether ``sampling`` changes logits by what occurred before."""
    return (
        sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.repetition_penalty != 1.0
    )


class Penalties:
    """The counts of every slot that asked, and the change they make to logits."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (slots, vocab_size)
        self._device = device
        self._output: Tensor | None = None  # int32 [slots, vocab], how often each token was generated
        self._prompt: Tensor | None = None  # bool [slots, vocab], whether it occurs in the prompt
        self._factors = np.ones((3, slots), dtype=np.float32)  # repetition, frequency, presence

    @property
    def nbytes(self) -> int:
        """Bytes of the tables: 0 until a sequence asked for a penalty."""
        if self._output is None or self._prompt is None:
            return 0
        return self._output.nbytes + self._prompt.nbytes

    def bind(
        self, slot: int, sampling: Sampling, prompt: NDArray[np.int32], output: NDArray[np.int32]
    ) -> None:
        """Rebuild the counts of ``slot`` from the tokens of its sequence so far, int32 [n] each."""
        if self._output is None or self._prompt is None:
            self._output = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        vocab = self._shape[1]
        seen = np.zeros(vocab, dtype=np.bool_)
        seen[prompt] = True
        counts = np.bincount(output, minlength=vocab).astype(np.int32)
        self._prompt[slot].copy_(torch.from_numpy(seen))
        self._output[slot].copy_(torch.from_numpy(counts))
        self._factors[:, slot] = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )

    def apply(self, logits: Tensor, slots: NDArray[np.int64]) -> None:
        """Change ``logits`` float32 [R, >= vocab] in place; row r belongs to ``slots[r]``, all bound here.

        The repetition penalty divides a positive logit and multiplies a negative one, once, for a token of
        prompt or output (Keskar et al., CTRL, 2019); then OpenAI's frequency (per occurrence) and
        presence (once) penalties are subtracted, for tokens of the output alone.
        """
        if self._output is None or self._prompt is None:
            return
        factors = self._factors[:, slots]
        rows = torch.from_numpy(slots).to(self._device)
        counts = self._output.index_select(0, rows)
        here = logits[:, : self._shape[1]]
        repetition, frequency, presence = torch.from_numpy(factors).to(self._device)[:, :, None]
        if (factors[0] != 1.0).any():
            seen = (counts > 0).logical_or_(self._prompt.index_select(0, rows))
            here.copy_(torch.where(seen, torch.where(here > 0, here / repetition, here * repetition), here))
        if factors[1].any() or factors[2].any():
            here.sub_(counts * frequency).sub_((counts > 0) * presence)

    def count(self, slots: NDArray[np.int64], tokens: Tensor) -> None:
        """Add one occurrence of ``tokens`` int64 [R] to the outputs of ``slots`` [R]; -1 adds nothing."""
        if self._output is None:
            return
        rows = torch.from_numpy(slots).to(self._device)
        ones = (tokens >= 0).to(torch.int32)
        self._output.index_put_((rows, tokens.clamp(min=0)), ones, accumulate=True)
