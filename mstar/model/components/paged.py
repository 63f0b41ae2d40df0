"""Where in a paged cache each row's keys and values lie: worked out once a step, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.model.api import ForwardBatch

__all__ = ["AttentionPlan", "GatheredRows", "PrefillRow", "Run", "RunRow"]

_LEAST_RUN = 128
_GROUP_TOKENS = 1400


class Run(NamedTuple):
    """`length` slots in a row from `start` on."""

    start: int
    length: int


class PrefillRow(NamedTuple):
    """A row with several new tokens (`tokens` of the batch).

    `run` is its cached tokens where they lie in one piece, `slots` [kv_len] otherwise,
    neither where nothing was cached before. `mask` [new, kv_len] is 0 or -inf, None for plain causal.
    """

    tokens: slice
    run: Run | None
    slots: Tensor | None
    mask: Tensor | None


class RunRow(NamedTuple):
    """A row with one new token (`token` of the batch) whose cached tokens lie in few long pieces, read in
    place."""

    token: int
    runs: list[Run]


class GatheredRows(NamedTuple):
    """D rows with one new token each, gathered together and padded to the longest.

    `tokens` int64 [D] of the batch, or None where they are the whole batch in order; `slots` int64 [D *
    length]; `mask` [D, 1, length], 0 or -inf, or None where all are equally long.
    """

    tokens: Tensor | None
    slots: Tensor
    mask: Tensor | None
    length: int


class AttentionPlan:
    """Which cached tokens each row of a batch attends to.

    On a CPU rows of one token whose pages follow each other are read in place, one row at a time: a
    gathered copy costs a third of the attention at 300 tokens and half at 1000. Short or scattered rows
    are gathered in groups that stay in the cache of the processor. On other devices all are gathered.
    """

    def __init__(self, batch: ForwardBatch, page_size: int, dtype: torch.dtype) -> None:
        self.slot_mapping = batch.slot_mapping
        self.prefills: list[PrefillRow] = []
        self.runs: list[RunRow] = []
        self.gathered: list[GatheredRows] = []
        pages = _Pages(batch, page_size)
        rest: list[tuple[int, int]] = []
        at = 0
        for row, (query_len, kv_len) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
            if query_len == 1:
                runs = pages.runs(row, kv_len)
                if runs is None:
                    rest.append((row, at))
                else:
                    self.runs.append(RunRow(at, runs))
            elif query_len:
                self.prefills.append(_prefill(pages, row, slice(at, at + query_len), kv_len, dtype))
            at += query_len
        self._gather(pages, rest, dtype)

    def _gather(self, pages: _Pages, rest: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        batch = pages.batch
        if len(rest) == len(batch.query_lens) and not pages.on_cpu:
            self.gathered.append(_gathered(pages, rest, None, dtype))
            return
        # Longest first: rows of like length share a group, and little of it is padding.
        ordered = sorted(rest, key=lambda pair: -batch.kv_lens[pair[0]])
        while ordered:
            longest = batch.kv_lens[ordered[0][0]]
            size = max(_GROUP_TOKENS // longest, 1) if pages.on_cpu else len(ordered)
            group, ordered = ordered[:size], ordered[size:]
            whole = len(group) == len(batch.query_lens) == 1
            tokens = None if whole else torch.tensor([at for _, at in group], device=pages.device)
            self.gathered.append(_gathered(pages, group, tokens, dtype))


class _Pages:
    """A batch's block tables, on the host where rows may be read in place."""

    def __init__(self, batch: ForwardBatch, page_size: int) -> None:
        self.batch = batch
        self.size = page_size
        self.device = batch.tokens.device
        self.on_cpu = self.device.type == "cpu"
        self._tables = batch.block_tables.numpy() if self.on_cpu else None
        self._breaks = None if self._tables is None else np.diff(self._tables, axis=1) != 1

    def runs(self, row: int, length: int) -> list[Run] | None:
        """The row's slots in few pieces of consecutive pages; None where the pieces are short on average."""
        if self._tables is None or self._breaks is None or length < _LEAST_RUN:
            return None
        count = -(-length // self.size)
        breaks = np.flatnonzero(self._breaks[row, : count - 1])
        if (breaks.size + 1) * _LEAST_RUN > length:
            return None
        firsts = [0, *(breaks + 1).tolist()]
        ends = [*firsts[1:], count]
        runs = []
        for first, end in zip(firsts, ends, strict=True):
            start = int(self._tables[row, first]) * self.size
            runs.append(Run(start, min(end * self.size, length) - first * self.size))
        return runs

    def slots(self, rows: Sequence[int], length: int) -> Tensor:
        """int64 [rows, length]: slots of tokens 0 .. length - 1 of each row."""
        tables = self.batch.block_tables[rows, : -(-length // self.size)].long().unsqueeze(-1)
        return (tables * self.size + torch.arange(self.size, device=self.device)).flatten(1)[:, :length]


def _prefill(pages: _Pages, row: int, tokens: slice, kv_len: int, dtype: torch.dtype) -> PrefillRow:
    count = tokens.stop - tokens.start
    if count == kv_len:
        return PrefillRow(tokens, None, None, None)
    runs = pages.runs(row, kv_len)
    run = runs[0] if runs is not None and len(runs) == 1 else None
    slots = None if run is not None else pages.slots([row], kv_len)[0]
    # Bottom-right causal: new token i, at position kv_len - count + i, sees everything up to itself.
    hidden = torch.ones(count, kv_len, dtype=torch.bool, device=pages.device).triu_(kv_len - count + 1)
    mask = torch.zeros(count, kv_len, dtype=dtype, device=pages.device).masked_fill_(hidden, float("-inf"))
    return PrefillRow(tokens, run, slots, mask)


def _gathered(
    pages: _Pages, rows: Sequence[tuple[int, int]], tokens: Tensor | None, dtype: torch.dtype
) -> GatheredRows:
    numbers = [row for row, _ in rows]
    lengths = [pages.batch.kv_lens[row] for row in numbers]
    longest = max(lengths)
    slots = pages.slots(numbers, longest)
    if min(lengths) == longest:
        return GatheredRows(tokens, slots.flatten(), None, longest)
    # Entries past a row's end are unspecified: read slot 0 there, and mask it.
    ends = torch.tensor(lengths, device=pages.device)
    past = torch.arange(longest, device=pages.device) >= ends.unsqueeze(1)
    mask = torch.zeros(past.shape, dtype=dtype, device=pages.device).masked_fill_(past, float("-inf"))
    return GatheredRows(tokens, slots.masked_fill_(past, 0).flatten(), mask.unsqueeze(1), longest)
