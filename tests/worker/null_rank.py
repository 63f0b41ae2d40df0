"""A rank without model, shared memory or loop: the real scheduler, slot table and device bookkeeping.

The null forward writes a token that depends on the request and the place alone, checks the carry it
reads against the token it wrote there, and keeps a picture of every KV page: each cell holds a digest of
all tokens up to its own. So a stale slot, a page freed early or shared wrongly, or a skipped token raises
instead of passing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.engine.device import CpuDevice, StepFailed
from mstar.engine.executor import Executor, RowRefused, SlotState
from mstar.engine.results import ResultSlot
from mstar.engine.slot_table import SlotTable
from mstar.messages.prefix import page_digests
from mstar.messages.request import Admit, Sampling
from mstar.messages.step import CARRY, LATE_LAST, Bind, StepPlan, open_plan
from mstar.messages.tokens import RUNNING, RowFailed
from mstar.worker.late import Constraint
from mstar.worker.leader import Leader
from mstar.worker.scheduler import REPLAYS_SLAB, Limits, MicroScheduler
from shm.errors import SlabExhausted
from shm.slab import SlabHandle
from shm.steps import StepLayout, StepSlot
from shm.steps import _plan as slot_places

__all__ = ["LIMITS", "Kept", "NullRank", "expected", "token_of"]

LIMITS = Limits(
    slots=8,
    max_seq_len=256,
    pages=128,
    page_size=4,
    batch_tokens=32,
    min_chunk_tokens=4,
    depth=1,
    max_waiting=64,
)
STOP_ID = 7
SALT = b"salt"


def token_of(request: int, place: int) -> int:
    """The null model's token of ``request`` at ``place`` of its sequence; never below 100."""
    return 100 + (request * 7919 + place * 104729) % 50000


def expected(request: int, prompt: int, count: int) -> list[int]:
    """The tokens a request of ``prompt`` tokens is owed."""
    return [token_of(request, prompt + i) for i in range(count)]


class Kept(NamedTuple):
    """What an owner was told of one request."""

    tokens: list[int]
    finish: list[int]
    failed: list[RowFailed]


class Replays:
    """The leader's replay slab, in plain memory and of a limited number of blocks."""

    def __init__(self, blocks: int = 64) -> None:
        self.blocks: dict[int, bytearray] = {}
        self._next = 0
        self._most = blocks

    def limit(self, blocks: int) -> None:
        """From now on there are so many blocks."""
        self._most = blocks

    def lease(self, nbytes: int) -> SlabHandle:
        if len(self.blocks) >= self._most:
            raise SlabExhausted("no block")
        self._next += 1
        self.blocks[self._next] = bytearray(nbytes)
        return SlabHandle(self._next, 0, nbytes)

    def view(self, handle: SlabHandle) -> memoryview:
        return memoryview(self.blocks[handle.block])

    def release(self, handle: SlabHandle) -> None:
        del self.blocks[handle.block]


class Steps:
    """A step ring in plain memory, without readers."""

    def __init__(self, layout: StepLayout) -> None:
        size = slot_places(layout)[1]
        memory = memoryview(bytearray(layout.slots * size))
        self._slots = [StepSlot(memory, i * size, layout) for i in range(layout.slots)]

    def narrow(self, grants: int) -> None:
        """From now on a record has room for so many grants."""
        for slot in self._slots:
            slot.grants = slot.grants[:, :grants]

    def begin(self, seq: int) -> StepSlot:
        return self._slots[seq % len(self._slots)]

    def commit(self, seq: int) -> None:
        pass

    def done(self, reader: int) -> int:
        raise IndexError(reader)

    def error(self, reader: int) -> str | None:
        raise IndexError(reader)


class NullRank(SlotState):
    """Admissions, aborts and turns of the main loop, one call each."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        rows = limits.slots
        grants = 2 * rows + limits.pages_of(limits.max_seq_len) + limits.batch_tokens // limits.page_size
        self.steps = Steps(StepLayout(rows, grants, limits.tail_bytes, 4, 0))
        self.replays = Replays()
        self.scheduler = MicroScheduler(limits, self.steps.begin, self.replays, salt=SALT)
        self.node = self.scheduler.nodes[0]
        self.table = SlotTable(rows, (limits.pages_of(limits.max_seq_len),))
        self.device = CpuDevice(rows, limits.depth, self._forward)
        self.executor = Executor([self.table], [self], self.device, self._input)
        self.leader = Leader(self.scheduler, self.executor, self.steps, 0, 4)
        self.prompts: dict[int, NDArray[np.int32]] = {}
        self.kept: dict[int, Kept] = {}
        self.plans: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self.fail_at: set[int] = set()
        self.stops: dict[int, int] = {}
        self.constraints: dict[int, Constraint] = {}
        """What those admitted next are held to; they draw the lowest token that they may."""
        self.released: list[int] = []
        self.refuse: dict[int, str] = {}
        """Requests that cannot be prepared, and why."""
        self.on_launch: Callable[[StepPlan], None] = lambda plan: None
        self._carry = np.full(rows, -1, np.int64)
        cells = limits.pages * limits.page_size
        self._cells = np.zeros(cells, np.uint64)
        self._weights = np.random.default_rng(1).integers(1, 1 << 63, limits.max_seq_len, dtype=np.uint64)
        self._broken: set[int] = set()
        self._logits: dict[int, tuple[int, int]] = {}
        self._drawn: dict[tuple[int, int], int] = {}

    # ---- what a test does --------------------------------------------------------------------

    def admit(
        self,
        request: int,
        prompt: int = 5,
        max_tokens: int = 4,
        *,
        family: int | None = None,
        shared: bool = True,
        **extra: object,
    ) -> None:
        """``family``: prompts of one family begin alike. Not ``shared``: without digests of its pages."""
        tokens = np.arange(prompt, dtype=np.int32) + 1000 * (request if family is None else family)
        fields: dict[str, Any] = {"prompt_tokens": prompt, "max_tokens": max_tokens, **extra}
        handle = SlabHandle(request, 0, tokens.nbytes)
        key = SALT if self.limits.prefix_cache else SALT + bytes([request % 256])
        digests = page_digests(tokens, self.limits.page_size, key) if shared else b""
        message = Admit(request=request, attempt=0, prompt=handle, sampling=Sampling(), **fields)
        asked = [sequence.request for sequence in message.sequences()]
        held_to = [self.constraints.pop(each) for each in asked if each in self.constraints]
        for sequence in message.sequences():
            self.prompts[sequence.request] = tokens
            self.kept[sequence.request] = Kept([], [], [])
        self.scheduler.admit(message, tokens, digests, lambda: self.released.append(request), held_to)
        self._told(self.scheduler.take_refusals())

    def turn(self) -> bool:
        """One turn of the main loop; False when there was nothing to do."""
        plan = self.leader.plan()
        if plan is not None:
            again = open_plan(plan.seq, self.steps.begin(plan.seq))
            assert again.digest == plan.digest
            self.plans.append((plan.seq, tuple(plan.request.tolist()), tuple(plan.drops.tolist())))
            self.on_launch(plan)
            self.leader.launch(again)
        in_flight = self.scheduler.pipeline.in_flight
        landed = self.leader.collect(flush=plan is None)
        if landed is None:
            return plan is not None or bool(in_flight)
        if landed.batch is not None:
            batch = landed.batch
            for request, place, token, finish in zip(
                batch.request.tolist(),
                batch.index.tolist(),
                batch.token.tolist(),
                batch.finish.tolist(),
                strict=True,
            ):
                kept = self.kept[request]
                assert place == len(kept.tokens), f"request {request}: token {place} after {len(kept.tokens)}"
                assert not kept.finish, f"request {request}: a token after its end"
                kept.tokens.append(token)
                if finish != RUNNING:
                    kept.finish.append(finish)
        self._told(landed.failed)
        return True

    def drain(self, turns: int = 20000) -> None:
        """Turn until idle; raises if that takes more than ``turns``."""
        for _ in range(turns):
            if not self.turn() and self.scheduler.idle:
                return
        raise AssertionError(f"still not idle after {turns} turns: {self.scheduler.statistics()}")

    def check_idle(self) -> None:
        """Everything is back: pages, slots, promises, leases."""
        pages = self.node.ledger.statistics()
        assert pages.free + pages.cached == pages.total
        assert pages.held == pages.promised == 0
        assert self.node.slots.free == self.limits.slots
        assert self.table.statistics().bound == 0
        assert not self.replays.blocks
        assert self.scheduler.pipeline.retiring == 0

    def _told(self, failures: Iterable[RowFailed]) -> None:
        for failure in failures:
            kept = self.kept[failure.request]
            assert not kept.finish
            assert not kept.failed
            kept.failed.append(failure)

    # ---- the null model ----------------------------------------------------------------------

    def _input(self, bind: Bind) -> NDArray[np.int32]:
        source = bind.inputs[0]
        if source.slab == REPLAYS_SLAB:
            return np.frombuffer(self.replays.view(source.handle), np.int32)
        assert bind.request not in self.released, "a prompt was given back before its bind was read"
        return self.prompts[bind.request]

    def bind(self, bind: Bind, tokens: NDArray[np.int32]) -> None:
        assert tokens.size == bind.length
        self._carry[bind.slot] = -1
        if bind.request in self.refuse:
            raise RowRefused(self.refuse[bind.request])

    def drop(self, slot: int, request: int) -> None:
        self._carry[slot] = -1

    def _forward(self, plan: StepPlan, results: ResultSlot) -> None:
        if plan.seq in self.fail_at:
            self._broken.update(plan.request.tolist())
            raise StepFailed("planted")
        for row in range(plan.request.size):
            slot, request = int(plan.slot[row]), int(plan.request[row])
            table, held = self.table.tables[0][slot], int(self.table.held[0][slot])
            base = int(self.table.length[slot] - self.table.accepted[slot])
            late = int(plan.late_sample[row])
            if late and plan.samples[row]:
                self._draw(plan, row, results)
                if late == LATE_LAST:
                    continue
                place = base + int(plan.counter[row]) + 1
                start, end = place - 1, place
            elif plan.source[row] == CARRY:
                place = base + int(plan.counter[row])
                start, end = place - 1, place
                if request not in self._broken:
                    assert self._carry[slot] == self._token(request, place - 1), "a stale carry was read"
            else:
                start, end = int(plan.chunk_starts[row]), int(plan.chunk_ends[row])
                place = end
            assert end <= held * self.limits.page_size, "a token without a page"
            size = self.limits.page_size
            at = np.arange(end)
            cells = table[at // size].astype(np.int64) * size + at % size
            held_there = self._picture(request, end)
            self._cells[cells[start:]] = held_there[start:]
            if request not in self._broken:
                assert (self._cells[cells] == held_there).all(), f"{request} reads what is not its own"
            if late:
                self._logits[slot] = (request, place)
            elif plan.samples[row]:
                token = self._token(request, place)
                results.tokens[slot] = token
                self._carry[slot] = token

    def _draw(self, plan: StepPlan, row: int, results: ResultSlot) -> None:
        """Draw late: from the logits that the row held, the lowest token of its mask."""
        slot, request = int(plan.slot[row]), int(plan.request[row])
        place = self.prompts[request].size + int(plan.counter[row])
        if request not in self._broken:
            assert self._logits[slot] == (request, place), "logits of another place were drawn from"
        mask = next(mask for mask in plan.masks if mask.slot == slot)
        bits = np.unpackbits(np.frombuffer(mask.allowed, np.uint8), bitorder="little")
        token = int(bits.argmax())
        self._drawn[request, place] = token
        results.tokens[slot] = token
        self._carry[slot] = token

    def _picture(self, request: int, end: int) -> NDArray[np.uint64]:
        """What the cells of the first ``end`` tokens of ``request`` hold: digests of all up to each."""
        prompt = self.prompts[request]
        tokens = [*prompt[:end].tolist(), *(self._token(request, at) for at in range(prompt.size, end))]
        return np.cumsum(np.array(tokens, np.uint64) * self._weights[:end])

    def _token(self, request: int, place: int) -> int:
        if (request, place) in self._drawn:
            return self._drawn[request, place]
        stop = self.stops.get(request)
        if stop is not None and place == self.prompts[request].size + stop:
            return STOP_ID
        return token_of(request, place)
