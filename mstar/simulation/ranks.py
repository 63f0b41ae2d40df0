"""Ranks around the real Leader, Follower and Executor, one virtual process each.

A turn of a rank is one event, as it is one stretch between two awaits of the rank actor; between any two
events a rank may die.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.engine.device import CpuDevice, StepFailed
from mstar.engine.executor import Executor
from mstar.engine.results import ResultSlot
from mstar.engine.slot_table import SlotTable
from mstar.messages.prefix import read_prompt
from mstar.messages.request import Abort, Control, control_decoder
from mstar.messages.step import Bind, DigestMismatch, StepPlan
from mstar.messages.tokens import RowFailed, encode_event, encode_tokens
from mstar.simulation.channels import VirtualStepReader
from mstar.simulation.clock import RankClock
from mstar.simulation.device import Launched, Stream, VirtualDevice
from mstar.simulation.invariants import Broken
from mstar.simulation.null_model import NullModel
from mstar.simulation.oracle import Foreseen
from mstar.worker.budget import StepWork
from mstar.worker.follower import Follower
from mstar.worker.leader import FollowerFailed, Leader
from mstar.worker.outcome import Landed
from mstar.worker.scheduler import REPLAYS_SLAB, MicroScheduler

if TYPE_CHECKING:
    from mstar.simulation.cell import Cell

__all__ = ["KEPT_STEPS", "FollowerRank", "LeaderRank", "Rank", "StepRecord"]

KEPT_STEPS = 64
"""Steps whose work is remembered; no follower is further behind."""


class StepRecord(NamedTuple):
    """One step as the leader saw it: times in nanoseconds, decode rows, tokens in chunks, all rows."""

    seq: int
    node: int
    planned_ns: int
    launched_ns: int
    landed_ns: int
    decodes: int
    chunk_tokens: int
    rows: int
    digest: int


class _Watched(Executor):
    """An executor whose last plan can be looked at."""

    last: StepPlan | None = None

    def launch(self, plan: StepPlan) -> None:
        self.last = plan
        super().launch(plan)


class Rank:
    """What every rank has: tables and models of all nodes, a device, a stream, an executor."""

    def __init__(self, cell: Cell, index: int) -> None:
        house = cell.house
        self.cell = cell
        self.index = index
        self.alive = True
        faults = house.faults.of_rank(index)
        self.slowness = faults.slowness
        self.clock = RankClock(house.clock, faults.skew_ns, faults.drift)
        self.models: list[NullModel] = []
        for node, limits in enumerate(house.nodes):
            table = SlotTable(limits.slots, (limits.pages_of(limits.max_seq_len),))
            self.models.append(NullModel(f"rank {index}, node {node}", limits, table, house.oracle))
        self.stream = Stream(index, cell.collectives, self.clock, faults.slowness)
        self.stream.on_finish = self._on_finish
        slots, depth = max(limits.slots for limits in house.nodes), house.nodes[0].depth
        lockstep = house.ranks > 1
        device: CpuDevice | VirtualDevice
        if house.inline:
            device = CpuDevice(slots, depth, self._forward, lockstep=lockstep, clock=self.clock.read)
        else:
            device = VirtualDevice(slots, depth, self._forward, self.stream, lockstep=lockstep)
        self.executor = _Watched([model.table for model in self.models], self.models, device, self._input)
        self._awaited = 0
        self._scheduled = self._busy = self._again = False

    # ---- turns -------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to do."""
        if self._busy:
            self._again = True
        elif not self._scheduled and self.alive:
            self._scheduled = True
            self.cell.house.clock.after(0, self._event)

    def die(self) -> None:
        """No event of this rank does anything any more."""
        self.alive = False
        self.stream.die()

    def check_idle(self) -> None:
        """Nothing is bound, held or running here. Raises Broken."""
        for model in self.models:
            if model.table.statistics().bound or model.holding:
                raise Broken("idle", f"rank {self.index} is idle with {model.holding} inputs held")

    def _event(self) -> None:
        self._scheduled = False
        if self.alive:
            self._guarded(self._turn)

    def _turn(self) -> None:
        raise NotImplementedError

    def _rest(self) -> None:
        """What follows a launch in the same turn."""

    def _guarded(self, action: Callable[[], None]) -> None:
        """A rank dies of what was planted; everything else is a fault of ours and ends the run."""
        try:
            action()
        except (StepFailed, FollowerFailed) as error:
            self.cell.kill(self.index, str(error))
        except DigestMismatch as error:
            if self.index not in self.cell.house.planted.spent:
                raise
            self.cell.kill(self.index, str(error))

    def _launched(self, plan: StepPlan, host_ns: int) -> None:
        """Go on once the launch is over: after its host time, on CPU when the forward is through."""
        house = self.cell.house
        signature: tuple[int, ...] = ()
        if house.ranks > 1:
            mine = self.models[plan.node].signature()
            signature = plan.digest, *(mine if self.index in house.groups[plan.node] else mine[:1])
        self.cell.audit.ran(self.index, plan.seq, signature)
        if house.inline and self.stream.busy_with(plan.seq):
            self._busy, self._awaited = True, plan.seq
        elif host_ns:
            self._busy = True
            house.clock.after(host_ns, self._resume)
        else:
            self._rest()

    def _resume(self) -> None:
        self._busy = False
        if self.alive:
            self._guarded(self._rest)
            if self._again:
                self._again = False
                self.wake()

    def _on_finish(self, seq: int) -> None:
        if self._awaited == seq:
            self._awaited = 0
            self._resume()
        else:
            self.wake()

    # ---- what the executor asks --------------------------------------------------------------

    def _input(self, bind: Bind) -> NDArray[np.int32]:
        source = bind.inputs[0]
        slab = self.cell.replays if source.slab == REPLAYS_SLAB else self.cell.prompts
        return np.frombuffer(slab.view(source.handle), np.int32, bind.length)

    def _forward(self, plan: StepPlan, results: ResultSlot) -> None:
        cell = self.cell
        house, model = cell.house, self.models[plan.node]
        if self.index not in house.groups[plan.node]:
            return
        if cell.short_of_memory.get(plan.seq) == self.index:
            model.spoil(plan, results)
            raise StepFailed(f"rank {self.index} has no memory for step {plan.seq}")
        work = cell.works[plan.seq % KEPT_STEPS]
        brings = model.brings(plan) if house.ranks > 1 else b""
        model.forward(plan, results)
        host_ns = round(house.cost.host_ns(work, house.ranks) * self.slowness)
        rows = plan.request.tobytes() + plan.slot.tobytes()
        launched = Launched(plan.seq, plan.node, rows, brings, work, house.clock.now + host_ns)
        self.stream.launch(launched, results)


class LeaderRank(Rank):
    """Rank 0: receive, plan, launch, collect, emit."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell, 0)
        house = cell.house
        self.scheduler = MicroScheduler(house.nodes, cell.steps.begin, cell.replays, salt=house.salt)
        self.stream.on_start = self._on_start
        self.leader = Leader(self.scheduler, self.executor, cell.steps, house.ranks - 1, house.slots)
        self.unsent: deque[bytes] = deque()
        self.hogs = [0] * len(house.nodes)
        self._planned: deque[StepRecord] = deque()

    def _turn(self) -> None:
        self._receive()
        plan = None if self.unsent else self.leader.plan()
        if plan is None:
            self._collect(flush=True)
            if self.scheduler.idle:
                self._check_pages()
            return
        cell, house = self.cell, self.cell.house
        seq, node = plan.seq, plan.node
        ledger = self.scheduler.nodes[node].ledger
        run = cell.plans.plan(plan, ledger.available, self.hogs[node] > 0)
        work = StepWork(run.decodes + run.chunk_tokens, run.rows, run.context)
        cell.works[seq % KEPT_STEPS] = work
        if work.rows:
            rank = house.planted.short_of_memory()
            if rank is not None:
                cell.short_of_memory[seq] = rank % house.ranks
        host_ns = round(house.cost.host_ns(work, house.ranks) * self.slowness)
        now = house.clock.now
        self._planned.append(
            StepRecord(seq, node, now, now + host_ns, 0, run.decodes, run.chunk_tokens, run.rows, plan.digest)
        )
        self.leader.launch(plan)
        self._launched(plan, host_ns)

    def _on_start(self, seq: int) -> None:
        if self.scheduler.drawing is not None:
            self.wake()

    def _rest(self) -> None:
        self._collect(flush=False)
        self.wake()

    def _check_pages(self) -> None:
        """Whenever nothing runs, every page is free or cached, and none is promised."""
        for index, node in enumerate(self.scheduler.nodes):
            ledger = node.ledger
            if not self.hogs[index] and (ledger.held or ledger.promised or node.slots.high):
                raise Broken("idle", f"node {index} is idle with {ledger.statistics()}")

    def _receive(self) -> None:
        admissions = self.cell.admissions
        while (record := admissions.receive()) is not None:
            message: Control = control_decoder.decode(record)
            if isinstance(message, Abort):
                self.cell.plans.over(message.request)
                self.scheduler.abort(message.request)
                continue
            prompts, handle = self.cell.prompts, message.prompt
            size = message.prompt_tokens + message.accepted
            tokens, digests = read_prompt(prompts.view(handle), size, message.hashes)
            ids = range(message.request, message.request + message.count)
            owed = self.cell.house.oracle.sequences
            late = [Foreseen(id, owed[id]) for id in ids] if owed[message.request].late else []
            self.scheduler.admit(message, tokens, digests, partial(prompts.release, handle), late)
        self._fail(self.scheduler.take_refusals())

    def _collect(self, *, flush: bool) -> None:
        landed = self.leader.collect(flush=flush)
        if landed is not None:
            self._record(landed)
            if landed.batch is not None:
                self.unsent.append(b"".join(bytes(part) for part in encode_tokens(landed.batch)))
            self._fail(landed.failed)
            self.wake()
        self._flush()

    def _record(self, landed: Landed) -> None:
        record = self._planned.popleft()
        self.cell.plans.land(record.seq, landed.batch, landed.failed)
        house = self.cell.house
        house.on_step(record._replace(landed_ns=house.clock.now))

    def _fail(self, failed: Sequence[RowFailed]) -> None:
        self.unsent.extend(encode_event(failure) for failure in failed)

    def _flush(self) -> None:
        unsent, tokens = self.unsent, self.cell.tokens
        while unsent and tokens.send(unsent[0]):
            unsent.popleft()
            if not unsent:
                self.wake()  # nothing was planned while it waited


class FollowerRank(Rank):
    """Every other rank: run what the leader decided."""

    def __init__(self, cell: Cell, index: int) -> None:
        super().__init__(cell, index)
        house = cell.house
        planted = house.planted
        self.steps: VirtualStepReader = cell.steps.reader(
            house.ring_delay, self.wake, lambda seq: planted.bends(seq, index)
        )
        self.follower = Follower(self.executor, self.steps)

    def _turn(self) -> None:
        if self.follower.turn():
            plan = self.executor.last
            assert plan is not None
            house = self.cell.house
            work = self.cell.works[plan.seq % KEPT_STEPS]
            self._launched(plan, round(house.cost.host_ns(work, house.ranks) * self.slowness))

    def _rest(self) -> None:
        self.wake()
