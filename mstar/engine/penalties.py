"""Penalties on tokens that occurred before: counts per slot, prompt and output kept apart.

Knows token counts and nothing of how a token is drawn. The tables are [slots, vocab] on the device and are
allocated when the first sequence that asks for a penalty is bound. Beside them each slot lists the
tokens that occurred, so that a step touches hundreds of logits of a row and not its whole vocabulary.
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
        self._slots = slots
        self._vocab = vocab_size
        self._device = device
        self._output = torch.empty((0, vocab_size), dtype=torch.int32, device=device)  # times generated
        self._prompt = torch.empty((0, vocab_size), dtype=torch.bool, device=device)  # occurs in the prompt
        self._seen = torch.empty((slots, 0), dtype=torch.int64, device=device)  # what occurred, with repeats
        self._lengths = np.zeros(slots, dtype=np.int64)  # of the rows of _seen
        self._factors = np.ones((3, slots), dtype=np.float32)  # repetition, frequency, presence

    @property
    def nbytes(self) -> int:
        """Bytes of the tables: 0 until a sequence asked for a penalty."""
        return self._output.nbytes + self._prompt.nbytes + self._seen.nbytes

    def bind(
        self, slot: int, sampling: Sampling, prompt: NDArray[np.int32], output: NDArray[np.int32]
    ) -> None:
        """Rebuild the counts of ``slot`` from the tokens of its sequence so far, int32 [n] each."""
        if not len(self._output):
            self._output = self._output.new_zeros((self._slots, self._vocab))
            self._prompt = self._prompt.new_zeros((self._slots, self._vocab))
        present = np.zeros(self._vocab, dtype=np.bool_)
        present[prompt] = True
        counts = np.bincount(output, minlength=self._vocab).astype(np.int32)
        self._prompt[slot].copy_(torch.from_numpy(present))
        self._output[slot].copy_(torch.from_numpy(counts))
        seen = np.flatnonzero(present | (counts > 0))
        self._reserve(len(seen))
        self._seen[slot, : len(seen)] = torch.from_numpy(seen).to(self._device)
        self._lengths[slot] = len(seen)
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
        lengths = self._lengths[slots]
        width = int(lengths.max(initial=0))
        if width == 0:
            return
        rows = torch.from_numpy(slots).to(self._device)
        seen = self._seen[rows, :width]
        before = logits.gather(1, seen)
        counts = self._output[rows[:, None], seen]
        factors = torch.from_numpy(self._factors[:, slots]).to(self._device)
        repetition, frequency, presence = factors[:, :, None]
        occurred = (counts > 0) | self._prompt[rows[:, None], seen]
        repeated = torch.where(before > 0, before / repetition, before * repetition)
        after = torch.where(occurred, repeated, before) - counts * frequency - (counts > 0) * presence
        # A token listed twice, and what a list holds beyond its length, gets the same value every time.
        logits.scatter_(1, seen, after)

    def count(self, slots: NDArray[np.int64], tokens: Tensor) -> None:
        """Add one occurrence of ``tokens`` int64 [R] to the outputs of ``slots`` [R]; -1 adds nothing."""
        self._reserve(int(self._lengths[slots].max(initial=0)) + 1)
        rows = torch.from_numpy(slots).to(self._device)
        drawn = tokens.clamp(min=0)
        self._output.index_put_((rows, drawn), (tokens >= 0).to(torch.int32), accumulate=True)
        self._seen[rows, torch.from_numpy(self._lengths[slots]).to(self._device)] = drawn
        self._lengths[slots] += 1

    def _reserve(self, length: int) -> None:
        """Make the lists hold ``length`` tokens a slot; room doubles, so that growing is rare."""
        if length > self._seen.shape[1]:
            grown = self._seen.new_zeros((self._slots, max(length, 2 * self._seen.shape[1], 256)))
            grown[:, : self._seen.shape[1]] = self._seen
            self._seen = grown
