"""LanguageModelRunner: the forward of one step of a causal language model, from a plan to sampled tokens.

It keeps by slot what rows read back (prompt, carry) and packs a plan's rows into one ForwardBatch.
"""

from __future__ import annotations

import time
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mstar.distributed.errors import CollectiveFailed
from mstar.engine.chunking import ChunkingManagement
from mstar.engine.device import StepFailed
from mstar.engine.executor import RowRefused, SlotState
from mstar.engine.results import ResultSlot
from mstar.engine.sampler import Sampler, SamplerError
from mstar.engine.slot_table import SlotTable
from mstar.messages.request import Sampling
from mstar.messages.step import CARRY, FLAG_LOGPROBS, LATE_LAST, Bind, StepPlan
from mstar.model.api import CausalLM, ForwardBatch, KVCache
from mstar.model.graphs import COMBINED, LLM

__all__ = ["LanguageModelRunner", "PromptInputs", "RunnerStatistics"]

_NO_PROMPT = np.zeros(1, np.int32)


class PromptInputs(NamedTuple):
    """The prepared input of a row, or of a chunk of it: token ids and their places, int64 [n] each."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return self.tokens.size

    def slice(self, start: int, end: int) -> PromptInputs:
        """The tokens [start, end) of a whole input; views."""
        return PromptInputs(self.tokens[start:end], self.positions[start:end])


class _Batch(NamedTuple):
    """A step as its budget is looked up."""

    node_name: str
    graph_walk: str


class RunnerStatistics(NamedTuple):
    """Steps run, tokens through the forward, and nanoseconds spent in forward and sampling together.

    ``prepared`` counts inputs prepared since the start; ``held`` are those kept now for their next chunk.
    """

    steps: int
    tokens: int
    device_ns: int
    prepared: int
    held: int


class LanguageModelRunner(SlotState):
    """Runs rows of ``table`` through ``model`` on the CPU.

    ``prompt`` is int32 [slots, max_seq_len]; ``carry`` int64 [slots], the last sampled token, -1
    from bind to first sample so that a premature read fails instead of decoding garbage. ``chunking``
    holds the input of a row from its first chunk until its last one has landed. Logits of rows that
    sample late are held by slot.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: KVCache,
        sampler: Sampler,
        table: SlotTable,
        *,
        page_size: int,
        max_seq_len: int,
        chunking: ChunkingManagement,
    ) -> None:
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._table = table
        self._page_size = page_size
        self._prompt: NDArray[np.int32] = np.zeros((table.count, max_seq_len), np.int32)
        self._carry: NDArray[np.int64] = np.full(table.count, -1, np.int64)
        self._chunking = chunking
        self._held: Tensor | None = None
        self._steps = self._tokens = self._device_ns = self._prepared = 0

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return self._model.spec.vocab_size

    # ---- SlotState ---------------------------------------------------------------------------

    def bind(self, bind: Bind, tokens: NDArray[np.int32]) -> None:
        slot = bind.slot
        self._prompt[slot, : tokens.size] = tokens
        self._carry[slot] = -1
        try:
            self._check_tokens(tokens)
            self._sampler.bind(
                slot,
                bind.sampling,
                stop_ids=bind.stop_ids,
                min_tokens=bind.min_tokens,
                prompt=tokens,
                accepted=bind.accepted,
            )
        except (RowRefused, SamplerError) as error:
            # The row may run until the leader has heard of it: then on tokens that every model has.
            self._prompt[slot, : tokens.size] = 0
            self._sampler.bind(slot, Sampling(0.0), stop_ids=(), min_tokens=0, prompt=_NO_PROMPT, accepted=0)
            raise RowRefused(str(error)) from error

    def _check_tokens(self, tokens: NDArray[np.int32]) -> None:
        """Raise RowRefused for an id outside of the vocabulary: several ranks would embed it as nothing."""
        vocabulary = self._model.spec.vocab_size
        outside = (tokens < 0) | (tokens >= vocabulary)
        if outside.any():
            at = int(outside.argmax())
            raise RowRefused(
                f"the prompt has the token id {int(tokens[at])} at place {at}; "
                f"the vocabulary has ids 0 to {vocabulary - 1}"
            )

    def drop(self, slot: int, request: int) -> None:
        self._carry[slot] = -1
        self._sampler.release(slot)
        self._chunking.forget_request(request)

    def input_landed(self, slot: int, request: int) -> None:
        self._chunking.release(request, LLM)

    def _whole_input(self, slot: int) -> PromptInputs:
        """Prepare the input of ``slot``: once per row, however many chunks it runs in."""
        length = int(self._table.length[slot])
        self._prepared += 1
        return PromptInputs(self._prompt[slot, :length].astype(np.int64), np.arange(length))

    def _chunk(self, slot: int, request: int, start: int, end: int) -> PromptInputs:
        """The tokens [start, end) of the input that is held for ``request`` since its first chunk."""
        held = self._chunking.prepared
        key = (request, LLM)
        if key not in held:
            held[key] = self._whole_input(slot)
        return cast(PromptInputs, held[key]).slice(start, end)

    # ---- the forward -------------------------------------------------------------------------

    def forward(self, plan: StepPlan, results: ResultSlot) -> None:
        """Run ``plan``'s rows and put their tokens into ``results`` and the carry.

        Raises StepFailed, and CollectiveFailed where a peer is gone: that is not this step's fault.
        """
        started = time.perf_counter_ns()
        try:
            with torch.inference_mode():
                self._run(plan, results)
        except CollectiveFailed:
            raise
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            self._carry[plan.slot] = 0  # these rows may be in flight again: their results no longer count
            raise StepFailed(f"the step failed: {type(error).__name__}: {error}") from error
        self._steps += 1
        self._device_ns += time.perf_counter_ns() - started

    def _run(self, plan: StepPlan, results: ResultSlot) -> None:
        if plan.masks:
            self._draw_late(plan, results)
        batch, rows, positions = self._pack(plan)
        if batch is None:
            return
        logits = self._model(batch, self._kv)
        late = plan.late_sample[rows] > 0
        if np.count_nonzero(late):
            self._hold(plan.slot[rows[late]], logits[torch.from_numpy(late)])
            logits = logits[torch.from_numpy(~late)]
            rows, positions = rows[~late], positions[~late]
        if rows.size:
            self._sample(plan, rows, positions, logits, results)

    def _sample(
        self,
        plan: StepPlan,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        logits: Tensor,
        results: ResultSlot,
        allowed: Tensor | None = None,
    ) -> None:
        """Draw tokens of ``rows`` of the plan, for the places ``positions``, from ``logits`` [r, vocab]."""
        slots = plan.slot[rows]
        logprobs = bool(plan.flags & FLAG_LOGPROBS)
        try:
            sampled = self._sampler.sample(logits, slots, positions, logprobs=logprobs, allowed=allowed)
        except SamplerError as error:
            if error.result is None:
                raise StepFailed(str(error)) from error
            sampled = error.result
            results.failed_slots = {**results.failed_slots, **dict.fromkeys(error.slots, str(error))}
        tokens = sampled.tokens.numpy()
        self._carry[slots] = np.maximum(tokens, 0)  # a row without a token fails, but may be in flight again
        results.tokens[slots] = tokens
        if sampled.logprob is not None and sampled.top_ids is not None and sampled.top_logprobs is not None:
            logprob, top_ids, top_logprobs = results.score()
            logprob[slots] = sampled.logprob.numpy()
            top_ids[slots] = sampled.top_ids.numpy()
            top_logprobs[slots] = sampled.top_logprobs.numpy()

    def _hold(self, slots: NDArray[np.int32], logits: Tensor) -> None:
        """Keep ``logits`` [r, vocab] of the rows of ``slots``: a later step begins with drawing from them."""
        self._held_logits(logits.dtype)[torch.from_numpy(slots.astype(np.int64))] = logits

    def _held_logits(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Logits held by slot, [slots, vocab]; zeros for a row whose step failed and that may ride again."""
        if self._held is None:
            self._held = torch.zeros((self._table.count, self.vocab_size), dtype=dtype)
        return self._held

    def _draw_late(self, plan: StepPlan, results: ResultSlot) -> None:
        """Before anything runs: rows that sample late draw from the logits that they held, under masks."""
        rows = np.flatnonzero((plan.late_sample > 0) & (plan.samples > 0))
        slots = plan.slot[rows]
        masks = {mask.slot: mask.allowed for mask in plan.masks}
        bits = np.frombuffer(b"".join(masks[slot] for slot in slots.tolist()), np.uint8)
        held = self._held_logits()
        allowed = np.unpackbits(bits.reshape(rows.size, -1), axis=1, count=held.shape[1], bitorder="little")
        logits = held[torch.from_numpy(slots.astype(np.int64))]
        base = self._table.length[slots] - self._table.accepted[slots]
        positions = (base + plan.counter[rows]).astype(np.int64)
        self._sample(plan, rows, positions, logits, results, torch.from_numpy(allowed).bool())

    def _pack(self, plan: StepPlan) -> tuple[ForwardBatch | None, NDArray[np.int64], NDArray[np.int64]]:
        """The batch, the plan rows that have logits, in their order, and the places of the tokens after them.

        Rows and places are int64 [r]; a place counts from the start of the sequence. None: nothing runs.
        """
        table = self._table
        carried = plan.source == CARRY
        decode = np.flatnonzero(carried & (plan.late_sample != LATE_LAST))
        if not decode.size and np.count_nonzero(carried) == plan.slot.size:
            return None, decode, decode
        slots = plan.slot[decode]
        base = table.length[slots] - table.accepted[slots]
        late = plan.late_sample[decode] > 0  # it has drawn the token at its counter just now
        last = (base + plan.counter[decode] - 1 + late).astype(np.int64)
        tokens = [self._carry[slots]]
        positions = [last]
        row_slots = [slots]
        query_lens = [1] * decode.size
        kv_lens: list[int] = (last + 1).tolist()
        logits = [np.arange(decode.size)]
        sample_rows = [decode]
        sample_positions = [last + 1]
        at = decode.size
        if np.count_nonzero(carried) < plan.slot.size:
            parts: list[PromptInputs] = []
            for row in np.flatnonzero(plan.source != CARRY).tolist():
                slot = int(plan.slot[row])
                if plan.chunk_starts.size and plan.chunk_starts[row] >= 0:
                    end = int(plan.chunk_ends[row])
                    part = self._chunk(slot, int(plan.request[row]), int(plan.chunk_starts[row]), end)
                else:
                    end = int(table.length[slot])
                    part = self._whole_input(slot)
                parts.append(part)
                tokens.append(part.tokens)
                positions.append(part.positions)
                row_slots.append(np.full(part.num_tokens, slot, np.int32))
                query_lens.append(part.num_tokens)
                kv_lens.append(end)
                at += part.num_tokens
                if plan.samples[row] or plan.late_sample[row]:
                    logits.append(np.array([at - 1]))
                    sample_rows.append(np.array([row]))
                    sample_positions.append(np.array([end]))
            decodes = PromptInputs(tokens[0], positions[0])
            self._chunking.check_budget(_Batch(LLM, COMBINED), (decodes, *parts))
        place = np.concatenate(positions)
        token_slots = np.concatenate(row_slots)
        size = self._page_size
        pages = table.tables[0]
        mapping = pages[token_slots, place // size].astype(np.int64) * size + place % size
        rows_slots = np.concatenate((slots, plan.slot[plan.source != CARRY]))
        widest = -(-max(kv_lens) // size)
        blocks = np.maximum(pages[rows_slots, :widest], 0)
        self._tokens += place.size
        batch = ForwardBatch(
            tokens=torch.from_numpy(np.concatenate(tokens)),
            positions=torch.from_numpy(place),
            slot_mapping=torch.from_numpy(mapping),
            query_lens=query_lens,
            kv_lens=kv_lens,
            block_tables=torch.from_numpy(blocks),
            logits_rows=torch.from_numpy(np.concatenate(logits)),
        )
        return batch, np.concatenate(sample_rows), np.concatenate(sample_positions)

    def warm_up(self, rows: int, chunk: int) -> None:
        """Run every kind of step once, so that the first request pays for nothing.

        That is a chunk of ``chunk`` tokens and decodes of 1 and of ``rows`` rows, each greedy, sampled and
        with logprobs. Nothing is bound yet; what it leaves in the KV cache is written over before it is read.
        """
        size, pages = self._page_size, self._kv.pages
        chunk = max(1, min(chunk, pages * size, self._prompt.shape[1]))
        rows = max(1, min(rows, pages, self._table.count))
        widest = -(-chunk // size)
        shapes = [
            ([chunk], [list(range(widest))]),
            ([1], [[0]]),
            ([1] * rows, [[page] for page in range(rows)]),
        ]
        with torch.inference_mode():
            for lengths, blocks in shapes:
                logits = self._model(self._dummy(lengths, blocks), self._kv)
                for sampling in (Sampling(0.0), Sampling(0.8, 0.9, 20, logprobs=20)):
                    slots = np.arange(len(lengths), dtype=np.int32)
                    prompt = np.zeros(1, np.int32)
                    for slot in slots.tolist():
                        self._sampler.bind(
                            slot, sampling, stop_ids=(), min_tokens=0, prompt=prompt, accepted=0
                        )
                    places = np.ones(len(lengths), np.int64)
                    self._sampler.sample(logits, slots, places, logprobs=sampling.logprobs >= 0)
                    for slot in slots.tolist():
                        self._sampler.release(slot)

    def _dummy(self, lengths: list[int], blocks: list[list[int]]) -> ForwardBatch:
        """Rows of ``lengths`` zero tokens from position 0, in the pages ``blocks``."""
        places = np.concatenate([np.arange(length) for length in lengths])
        pages = np.repeat(np.arange(len(lengths)), lengths)
        table = np.array(blocks, np.int32)
        size = self._page_size
        return ForwardBatch(
            tokens=torch.zeros(places.size, dtype=torch.int64),
            positions=torch.from_numpy(places),
            slot_mapping=torch.from_numpy(
                table[pages, places // size].astype(np.int64) * size + places % size
            ),
            query_lens=lengths,
            kv_lens=lengths,
            block_tables=torch.from_numpy(table),
            logits_rows=torch.from_numpy(np.cumsum(lengths) - 1),
        )

    def statistics(self) -> RunnerStatistics:
        """Counts since the start."""
        return RunnerStatistics(
            self._steps, self._tokens, self._device_ns, self._prepared, len(self._chunking.prepared)
        )
