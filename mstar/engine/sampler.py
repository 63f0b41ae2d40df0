"""The sampler: one token per row from its logits, its parameters and a counter-based uniform.

Order of what is done to a row, where it asks for it (vLLM's and transformers' order):

1. logit bias;
2. repetition, then frequency and presence penalties;
3. stop ids are forbidden while fewer than ``min_tokens`` tokens were generated;
4. temperature 0: the largest logit, ties by the lowest id, and nothing below applies;
5. temperature, top-k, top-p, min-p (see sample_draw);
6. the inverse CDF in vocabulary order at the uniform of (seed, choice, node, position).

A row's token depends on its own logits, parameters and key, never on the rows beside it. Logprobs are
those of the raw logits, before step 1.

State lies in slot space: parameters on the host, penalty counts on the device. The sampler knows
no request, and nothing of when a sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mstar.engine.logprobs import TOP, raw_logprobs
from mstar.engine.penalties import Penalties, has_penalties
from mstar.engine.philox import uniforms
from mstar.engine.sample_draw import LIGHTEST, RowParameters, argmax, draw, padded, threshold, weigh
from mstar.messages.request import Sampling

__all__ = ["SampleResult", "Sampler", "SamplerError", "SamplerStatistics"]

_CPU_WEIGHTS = 400_000  # weights worked on at once on a CPU, in whole rows: they stay in the cache

Rows = NDArray[np.int64]


class SampleResult(NamedTuple):
    """The tokens of R rows. A row without a finite largest logit has the token -1.

    ``tokens`` int64 [R]; ``logprob`` float32 [R] of the drawn token under the raw model; ``top_ids`` int64
    [R, 20] and ``top_logprobs`` float32 [R, 20], the likeliest first. The last three are None when no
    row asks; a row that did not ask carries NaN and id -1.
    """

    tokens: Tensor
    logprob: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None


class SamplerStatistics(NamedTuple):
    """Counts since the start, in rows; ``penalty_bytes`` is what the penalty tables hold now."""

    greedy: int
    sampled: int
    filtered: int
    penalised: int
    scored: int
    refused: int
    penalty_bytes: int


class SamplerError(Exception):
    """Rows of a step whose logits allow no token, or a slot that was never bound.

    ``rows`` are their indices in the step and ``slots`` their slots; ``result`` holds the other rows'
    tokens, which are good (None when nothing was sampled).
    """

    def __init__(
        self, message: str, rows: tuple[int, ...], slots: tuple[int, ...], result: SampleResult | None = None
    ) -> None:
        super().__init__(message)
        self.rows = rows
        self.slots = slots
        self.result = result


class Sampler:
    """Draws the tokens of one node on one device."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device, node: int = 0) -> None:
        """``slots`` and ``vocab_size`` bound the state; ``node`` is part of the key of every uniform."""
        self._vocab = vocab_size
        self._width = padded(vocab_size)
        self._device = device
        self._chunk = max(_CPU_WEIGHTS // self._width, 1) if device.type == "cpu" else max(slots, 1)
        self._penalties = Penalties(slots, vocab_size, device)
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._stop_ids: dict[int, Tensor] = {}
        self._bound = np.zeros(slots, dtype=np.bool_)
        self._sampled = np.zeros(slots, dtype=np.bool_)
        self._filtered = np.zeros(slots, dtype=np.bool_)
        self._penalised = np.zeros(slots, dtype=np.bool_)
        self._biased = np.zeros(slots, dtype=np.bool_)
        self._scored = np.zeros(slots, dtype=np.bool_)
        self._free_to_stop = np.zeros(slots, dtype=np.int64)  # the first position where a stop id may come
        self._seed = np.zeros(slots, dtype=np.int64)
        self._choice = np.zeros(slots, dtype=np.int64)
        self._node = node
        self._parameters = np.ones((4, slots), dtype=np.float64)  # the fields of RowParameters but the last
        self._counts = dict.fromkeys(SamplerStatistics._fields, 0)

    @torch.inference_mode()
    def bind(
        self,
        slot: int,
        sampling: Sampling,
        *,
        stop_ids: Sequence[int],
        min_tokens: int,
        prompt: NDArray[np.int32],
        accepted: int,
    ) -> None:
        """Give ``slot`` to a sequence: ``prompt`` int32 [n], of which the last ``accepted`` were generated.

        Binding again, as a resume does, starts from what these tokens say and from nothing older. Raises
        SamplerError when a token id, of the prompt of a penalised sequence or of a logit bias, lies
        outside the vocabulary. A stop id outside it can never be drawn and is ignored.
        """
        self.release(slot)
        split = len(prompt) - accepted
        biased = np.array([token for token, _ in sampling.logit_bias], dtype=np.int64)
        self._check(slot, biased, "logit_bias")
        if has_penalties(sampling):
            self._check(slot, prompt, "prompt")
            self._penalties.bind(slot, sampling, prompt[:split], prompt[split:])
            self._penalised[slot] = True
        if len(biased):
            values = torch.tensor([value for _, value in sampling.logit_bias], dtype=torch.float32)
            self._bias[slot] = (torch.from_numpy(biased).to(self._device), values.to(self._device))
            self._biased[slot] = True
        stops = [token for token in stop_ids if 0 <= token < self._vocab]
        if stops and min_tokens > accepted:
            self._stop_ids[slot] = torch.tensor(stops, dtype=torch.int64, device=self._device)
            self._free_to_stop[slot] = split + min_tokens
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab else 0
        self._sampled[slot] = sampling.temperature > 0
        self._filtered[slot] = sampling.temperature > 0 and (top_k > 0 or sampling.top_p < 1)
        self._scored[slot] = sampling.logprobs >= 0
        self._seed[slot], self._choice[slot] = sampling.seed, sampling.choice
        self._parameters[:, slot] = (sampling.temperature, top_k, sampling.top_p, sampling.min_p)
        self._bound[slot] = True

    def release(self, slot: int) -> None:
        """Forget what ``slot`` was bound to; nothing happens when it was not."""
        self._bias.pop(slot, None)
        self._stop_ids.pop(slot, None)
        self._free_to_stop[slot] = 0
        for flag in (self._bound, self._penalised, self._biased):
            flag[slot] = False

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        positions: NDArray[np.int64],
        *,
        logprobs: bool,
        allowed: Tensor | None = None,
    ) -> SampleResult:
        """Draw the next token of R rows; ``logits`` [R, vocab] of any float dtype stay as they are.

        ``allowed`` bool [R, vocab] forbids the other tokens; logprobs are of the raw model all the same.

        ``slots`` int32 [R], distinct and bound; ``positions`` int64 [R], the place of each new token in its
        whole sequence. ``logprobs`` False computes none, whoever asks. Raises SamplerError naming each row
        whose logits hold NaN or +inf or forbid every token; on a CUDA device nothing is read back
        here, and the caller passes the tokens it has read to ``check``.
        """
        rows = slots.astype(np.int64)
        self._refuse_unbound(rows)
        raw = logits
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        sampled = self._sampled[rows]
        held = positions < self._free_to_stop[rows]
        processed = self._penalised[rows] | self._biased[rows] | held
        if not (sampled.any() or processed.any()):
            tokens = self._greedy(logits)
        else:
            tokens = self._mixed(logits, rows, positions, sampled, processed, held)
        self._counts["sampled"] += int(sampled.sum())
        self._counts["greedy"] += len(rows) - int(sampled.sum())
        result = SampleResult(tokens, None, None, None)
        scored = np.flatnonzero(self._scored[rows]) if logprobs else rows[:0]
        if len(scored):
            result = self._score(raw, scored, tokens)
        if self._device.type == "cpu":
            self.check(tokens.numpy(), slots, result)
        return result

    def check(
        self, tokens: NDArray[np.int64], slots: NDArray[np.int32], result: SampleResult | None = None
    ) -> None:
        """Raise SamplerError naming the rows of ``tokens`` [R], on the host, that are -1."""
        if len(tokens) and tokens.min() < 0:
            rows = tuple(np.flatnonzero(tokens < 0).tolist())
            where = tuple(int(slots[row]) for row in rows)
            self._counts["refused"] += len(rows)
            raise SamplerError(
                f"the logits of row {_listed(rows)} (slot {_listed(where)}) have no finite maximum: "
                "a NaN or +inf, or every token is forbidden; the model's forward failed for this row.",
                rows,
                where,
                result,
            )

    def statistics(self) -> SamplerStatistics:
        """Rows by what they cost, since the start."""
        return SamplerStatistics(**{**self._counts, "penalty_bytes": self._penalties.nbytes})

    def _mixed(
        self,
        logits: Tensor,
        slots: Rows,
        positions: NDArray[np.int64],
        sampled: NDArray[np.bool_],
        processed: NDArray[np.bool_],
        held: NDArray[np.bool_],
    ) -> Tensor:
        """The tokens of a step in which some rows are sampled or processed, each kind of row apart."""
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        parameters = self._row_parameters(slots, positions, sampled)
        filtered = self._filtered[slots]
        self._counts["filtered"] += int(filtered.sum())
        self._counts["penalised"] += int(self._penalised[slots].sum())
        plain = np.flatnonzero(~sampled & ~processed)
        if len(plain):
            index = self._index(plain)
            tokens[index] = self._greedy(logits.index_select(0, index))
        for kind in (~sampled & processed, sampled & ~filtered, filtered):
            for chunk in self._chunks(np.flatnonzero(kind)):
                index = self._index(chunk)
                values = self._floats(logits.index_select(0, index))
                self._process(values, slots[chunk], processed[chunk], held[chunk])
                if sampled[chunk[0]]:
                    some = RowParameters(*parameters.index_select(1, index))
                    tokens[index] = self._draw(values, some, filtered=bool(filtered[chunk[0]]))
                else:
                    tokens[index] = _chosen(*argmax(values))
        counted = np.flatnonzero(self._penalised[slots])
        if len(counted):
            self._penalties.count(slots[counted], tokens[self._index(counted)])
        return tokens

    def _greedy(self, logits: Tensor) -> Tensor:
        """The largest logit of each row as it came: int64 [R], -1 where it is not finite."""
        if self._device.type != "cpu":
            return _chosen(*logits.max(-1))
        if logits.dtype == torch.float32 and logits.shape[1] == self._width and logits.is_contiguous():
            return _chosen(*argmax(logits))
        chunks = range(0, logits.shape[0], self._chunk)
        return torch.cat(
            [_chosen(*argmax(self._floats(logits[first : first + self._chunk]))) for first in chunks]
        )

    def _process(
        self, values: Tensor, slots: Rows, processed: NDArray[np.bool_], held: NDArray[np.bool_]
    ) -> None:
        """Bias, penalties and forbidden stop ids, in place, on the rows that ask."""
        if not processed.any():
            return
        for row in np.flatnonzero(self._biased[slots]):
            values[row].index_add_(0, *self._bias[int(slots[row])])
        penalised = np.flatnonzero(self._penalised[slots])
        if len(penalised) == len(slots):
            self._penalties.apply(values, slots)
        elif len(penalised):
            index = self._index(penalised)
            some = values.index_select(0, index)
            self._penalties.apply(some, slots[penalised])
            values.index_copy_(0, index, some)
        for row in np.flatnonzero(held):
            values[row].index_fill_(0, self._stop_ids[int(slots[row])], -torch.inf)

    def _draw(self, values: Tensor, rows: RowParameters, *, filtered: bool) -> Tensor:
        largest = values.amax(-1)
        weights = weigh(values, largest, rows.temperature, out=values)
        cut = rows.min_p.clamp(min=LIGHTEST).to(torch.float32)
        if filtered:
            cut = torch.maximum(cut, threshold(weights, rows))
        return _chosen(largest, draw(weights, cut, rows.uniform))

    def _score(self, logits: Tensor, scored: Rows, tokens: Tensor) -> SampleResult:
        rows = logits.shape[0]
        logprob = torch.full((rows,), torch.nan, device=self._device)
        top_ids = torch.full((rows, TOP), -1, dtype=torch.int64, device=self._device)
        top_logprobs = torch.full((rows, TOP), torch.nan, device=self._device)
        self._counts["scored"] += len(scored)
        for chunk in self._chunks(scored):
            index = self._index(chunk)
            logprob[index], top_ids[index], top_logprobs[index] = raw_logprobs(
                self._floats(logits.index_select(0, index)), tokens[index]
            )
        return SampleResult(tokens, logprob, top_ids, top_logprobs)

    def _row_parameters(
        self, slots: Rows, positions: NDArray[np.int64], sampled: NDArray[np.bool_]
    ) -> Tensor:
        """RowParameters as one float64 [5, R] on the device; the uniforms of greedy rows stay 0."""
        columns = np.zeros((5, len(slots)))
        columns[:4] = self._parameters[:, slots]
        drawn = slots[sampled]
        node = np.full(len(drawn), self._node, dtype=np.int64)
        columns[4, sampled] = uniforms(self._seed[drawn], self._choice[drawn], node, positions[sampled])
        return torch.from_numpy(columns).to(self._device)

    def _floats(self, logits: Tensor) -> Tensor:
        """A float32 copy of ``logits`` [R, vocab], filled up with -inf to whole blocks."""
        values = torch.empty((logits.shape[0], self._width), dtype=torch.float32, device=self._device)
        values[:, : self._vocab].copy_(logits)
        if self._width > self._vocab:
            values[:, self._vocab :] = -torch.inf
        return values

    def _chunks(self, rows: Rows) -> Iterator[Rows]:
        for first in range(0, len(rows), self._chunk):
            yield rows[first : first + self._chunk]

    def _index(self, rows: Rows) -> Tensor:
        return torch.from_numpy(rows).to(self._device)

    def _refuse_unbound(self, slots: Rows) -> None:
        if not self._bound[slots].all():
            rows = tuple(np.flatnonzero(~self._bound[slots]).tolist())
            where = tuple(int(slots[row]) for row in rows)
            raise SamplerError(
                f"row {_listed(rows)} samples in slot {_listed(where)}, which is not bound; "
                "bind a slot before its first step and release it after its last.",
                rows,
                where,
            )

    def _check(self, slot: int, tokens: NDArray[np.integer], what: str) -> None:
        outside = np.flatnonzero((tokens < 0) | (tokens >= self._vocab))
        if len(outside):
            raise SamplerError(
                f"{what} holds the token id {int(tokens[outside[0]])} at index {int(outside[0])}; "
                f"the vocabulary has ids 0 to {self._vocab - 1}.",
                (),
                (slot,),
            )


def _chosen(largest: Tensor, tokens: Tensor) -> Tensor:
    return torch.where(largest.isfinite(), tokens, -1)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
