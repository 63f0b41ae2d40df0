"""Limits: what bounds a decider."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TAIL_BYTES", "Limits"]

TAIL_BYTES = 64 << 10
"""Room of a step's record for its binds, the same in the step ring and in what is planned for it."""

_PAGE_ROUND = 8
_MASK_HEAD = 16
_FLOOR_SHARE = 4


class Limits(NamedTuple):
    """What bounds a node of a decider: slots, tokens of one sequence, pages and their tokens, tokens a step.

    ``horizon_tokens`` is how far ahead of what a row has generated its pages are promised,
    ``tail_bytes`` the room for the binds of one step. ``chunked`` False runs prompts whole, as many as fit
    into ``batch_tokens`` beside the decodes and one at least. ``mixes`` False never puts prefill and decode
    rows into one step. ``prefill_cap`` is the most prefill tokens of a step that also decodes (0: no cap).
    ``target_itl_ns`` sizes the steps that decode instead of ``batch_tokens``, which stays their bound.
    ``mask_bytes`` is the size of a Mask: an eighth of the vocabulary.
    """

    slots: int
    max_seq_len: int
    pages: int
    page_size: int
    batch_tokens: int
    min_chunk_tokens: int
    depth: int
    max_waiting: int
    tail_bytes: int = TAIL_BYTES
    horizon_tokens: int = 256
    chunked: bool = True
    mixes: bool = True
    prefix_cache: bool = True
    prefill_cap: int = 0
    target_itl_ns: int = 0
    mask_bytes: int = 0

    def pages_of(self, tokens: int) -> int:
        """How many pages ``tokens`` tokens of one sequence take."""
        return -(-tokens // self.page_size)

    @property
    def page_round(self) -> int:
        """Steps from one round of giving pages to the next: no row needs two pages in so many."""
        return min(_PAGE_ROUND, self.page_size)

    @property
    def chunk_floor(self) -> int:
        """The fewest tokens a chunk has, but for a prompt's last one.

        At most a quarter of a step, what decodes in every slot would leave of it, and a cap on prefill:
        else a prompt could wait for a step that hardly ever comes.
        """
        most = min(self.batch_tokens // _FLOOR_SHARE, self.batch_tokens - self.slots)
        if self.prefill_cap:
            most = min(most, self.prefill_cap)
        return min(self.min_chunk_tokens, max(1, most))

    @property
    def bind_bytes(self) -> int:
        """Bytes that the binds of one step may take together."""
        return self.tail_bytes - 64 - self.masks * (self.mask_bytes + _MASK_HEAD)

    @property
    def masks(self) -> int:
        """How many rows may draw under a mask in one step: what half of the record's tail has room for."""
        return self.tail_bytes // 2 // (self.mask_bytes + _MASK_HEAD) if self.mask_bytes else 0
