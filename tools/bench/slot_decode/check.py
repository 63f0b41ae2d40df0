"""Rows that join and leave a slot decoder between steps, checked against the eager float32 reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from tools.bench.slot_decode.attention import Attention
from tools.bench.slot_decode.model import Weights, reference_forward
from tools.bench.slot_decode.state import Rows, Shape, SlotState
from tools.bench.slot_decode.step import SlotDecoder


class Join(NamedTuple):
    """A prompt of random tokens enters a slot with room for `room` new ones."""

    slot: int
    prompt: int
    room: int


class Verdict(NamedTuple):
    """Generated tokens against the float32 reference's greedy choice at the same position.

    A gap is the reference's top logit less its logit of the token taken. The same reference run eagerly in
    the cache's dtype says how many differences, and how large, rounding alone makes.
    """

    tokens: int
    distinct: int
    equal: int
    worst_gap: float
    rounding_equal: int
    rounding_worst_gap: float


class Conversation:
    """Prompts whose keys and values the reference puts into the slot's pages; the decoder does the rest.

    At most one row joins a step. Every step is launched before the one before it is collected.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        state: SlotState,
        buckets: tuple[int, ...],
        attention: Callable[[Rows], Attention],
        *,
        seed: int,
        horizon: int = 1,
    ) -> None:
        self.shape, self.weights, self.state = shape, weights, state
        self.random = np.random.default_rng(seed)
        self.decoder = SlotDecoder(weights, shape, state, buckets, attention, horizon=horizon)
        self.free = [int(page) for page in self.random.permutation(np.arange(1, len(state.cache[0])))]
        self.tokens: dict[int, list[int]] = {}
        self.prompt: dict[int, int] = {}
        self.finished: list[tuple[list[int], int]] = []

    def join(self, join: Join) -> None:
        device, page_size = self.state.carry.device, self.state.page_size
        tokens = self.random.integers(0, self.shape.vocab, join.prompt).tolist()
        pages = [self.free.pop() for _ in range((join.prompt + join.room) // page_size + 1)]
        _, kv = reference_forward(self.weights, self.shape, torch.tensor(tokens, device=device))
        at = torch.arange(join.prompt - 1, device=device)  # the last prompt token is the first step's input
        page = torch.tensor(pages, device=device)[at // page_size]
        for cache, parts in zip(self.state.cache, kv, strict=True):
            for part, values in enumerate(parts):
                cache[page, part, at % page_size] = values[:-1].to(cache.dtype)
        grants = np.array([(join.slot, index, page) for index, page in enumerate(pages)], dtype=np.int32)
        self.decoder.bind(np.array([(join.slot, join.prompt - 1, tokens[-1])], dtype=np.int32), grants)
        self.tokens[join.slot], self.prompt[join.slot] = tokens, join.prompt

    def leave(self, slot: int) -> None:
        self.finished.append((self.tokens.pop(slot), self.prompt.pop(slot)))

    def collect(self, step: int) -> None:
        slots, tokens = self.decoder.collect(step)
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            self.tokens[slot].append(token)

    def run(self, steps: int, joins: Mapping[int, Join], leaves: Mapping[int, int]) -> None:
        """Before step i (from 0) the row leaves[i] stops riding and joins[i] starts."""
        riding: list[int] = []
        for step in range(steps):
            if step in leaves:
                riding.remove(leaves[step])
            if step in joins:
                riding.append(joins[step].slot)
                if joins[step].slot in self.tokens:
                    raise ValueError(f"slot {joins[step].slot} is taken at step {step}")
                self.join(joins[step])
            self.decoder.launch(np.array(riding, dtype=np.int32))
            if step:
                self.collect(step)
            if step in leaves:
                self.leave(leaves[step])
        self.collect(steps)
        for slot in list(self.tokens):
            self.leave(slot)

    def verdict(self) -> Verdict:
        """Teacher-forced, so that one near-tie does not decide the rest of its sequence."""
        dtype = self.state.cache[0].dtype
        generated: list[int] = []
        gaps: list[torch.Tensor] = []
        rounding: list[torch.Tensor] = []
        for tokens, prompt in self.finished:
            ids = torch.tensor(tokens, device=self.state.carry.device)
            exact, rounded = (
                reference_forward(self.weights, self.shape, ids, kind)[0][prompt - 1 : -1]
                for kind in (torch.float32, dtype)
            )
            top = exact.amax(-1)
            gaps.append(top - exact.gather(-1, ids[prompt:, None])[:, 0])
            rounding.append(top - exact.gather(-1, rounded.argmax(-1)[:, None])[:, 0])
            generated += tokens[prompt:]
        ours, theirs = torch.cat(gaps), torch.cat(rounding)
        return Verdict(
            len(generated),
            len(set(generated)),
            int((ours == 0).sum()),
            float(ours.max()),  # NaN stays NaN
            int((theirs == 0).sum()),
            float(theirs.max()),
        )
