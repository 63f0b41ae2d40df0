"""The world: one gateway, one cell of ranks, and everything that happens to them, under one clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.simulation.cell import Cell, House, StepRecord
from mstar.simulation.channels import Channel, Delay, VirtualSlab
from mstar.simulation.clock import VirtualClock
from mstar.simulation.cost import FREE, StepCost
from mstar.simulation.faults import NO_FAULTS, Death, Faults, Hog, Planted
from mstar.simulation.gateway import Ask, TokenEvent, VirtualGateway
from mstar.simulation.invariants import Broken
from mstar.simulation.oracle import MASK_BYTES, Oracle
from mstar.worker.limits import Limits
from mstar.worker.scheduler import SchedulerStatistics

__all__ = ["Outcome", "World", "WorldStatistics"]

_SALT = b"virtual"
_TOKENS = 50_000
_PROGRESS_EVENTS = 4096


class WorldStatistics(NamedTuple):
    """Events run, steps landed, cells that died, and what the last cell's scheduler counted."""

    events: int
    steps: int
    restarts: int
    scheduler: SchedulerStatistics


class Outcome(NamedTuple):
    """What a run gave, in the order in which it happened."""

    events: list[TokenEvent]
    steps: list[StepRecord]
    statistics: WorldStatistics


class World:
    """Builds a house for ``nodes`` over ``ranks`` ranks and runs it.

    ``groups[k]`` are the ranks that run node ``k`` in lockstep, all by default. Nodes share one leader,
    rank 0, and one step ring of ``ring_slots`` steps. ``inline``: the ranks are their devices, as on CPU.
    ``channel_delay_ns`` and ``ring_delay_ns`` bound the random delays of messages and of steps on
    their way. Everything random follows from ``seed``. ``most_events`` ends a run that never rests.
    ``keep`` False: events and steps are checked and counted, not kept.
    """

    def __init__(
        self,
        nodes: Limits | Sequence[Limits],
        *,
        ranks: int = 1,
        groups: Sequence[Sequence[int]] | None = None,
        cost: StepCost = FREE,
        seed: int = 0,
        faults: Faults = NO_FAULTS,
        inline: bool = False,
        capacity: int = 1 << 16,
        channel_delay_ns: int = 0,
        ring_delay_ns: int = 0,
        channel_records: int = 1 << 16,
        prompts: int = 1 << 16,
        replays: int = 64,
        ring_slots: int = 8,
        most_events: int | None = None,
        keep: bool = True,
    ) -> None:
        limits = (nodes,) if isinstance(nodes, Limits) else tuple(nodes)
        everyone = tuple(range(ranks))
        self._random = Random(seed)
        self.clock = VirtualClock(self._random)
        self.oracle = Oracle()
        self.faults = faults
        self._delay = Delay(self._random, channel_delay_ns)
        self._house = House(
            clock=self.clock,
            nodes=limits,
            groups=tuple(map(tuple, groups)) if groups is not None else (everyone,) * len(limits),
            ranks=ranks,
            cost=cost,
            faults=faults,
            planted=Planted(faults),
            oracle=self.oracle,
            inline=inline,
            slots=max(ring_slots, limits[0].depth + 2),
            replays=replays,
            salt=_SALT,
            ring_delay=Delay(self._random, ring_delay_ns),
            on_step=self._on_step,
            on_death=self._on_death,
        )
        if len(self._house.groups) != len(limits) or any(not group for group in self._house.groups):
            raise ValueError(f"{len(limits)} nodes need as many groups of ranks, not {self._house.groups}")
        self._records, self._prompts = channel_records, prompts
        self._most_events = most_events
        self._events: list[TokenEvent] = []
        self._steps: list[StepRecord] = []
        self._keep = keep
        self._landed = self._restarts = 0
        self._next = 1
        self._deaths = sorted(faults.deaths, key=lambda death: death.event, reverse=True)
        self.gateway = VirtualGateway(
            self.clock, limits, self.oracle, _SALT, capacity, self._delay, self._on_event
        )
        self.on_token: Callable[[TokenEvent], None] = lambda event: None
        self.on_landed: Callable[[StepRecord], None] = lambda record: None
        self.cell: Cell | None = None
        self._start()
        for hog in faults.hogs:
            self.clock.at(hog.at_ns, lambda hog=hog: self._hog(hog))  # type: ignore[misc]

    # ---- what happens ------------------------------------------------------------------------

    def submit(
        self,
        at_ns: int,
        prompt: int | NDArray[np.int32],
        max_tokens: int,
        *,
        node: int = 0,
        count: int = 1,
        stop_at: int = 0,
        text_at: int = 0,
        refused: bool = False,
        late: bool = False,
    ) -> int:
        """A request arrives at the gateway at ``at_ns``; returns the id of its first sequence.

        ``prompt`` is int32 token ids, or how many random ones. Further sequences of ``count`` have the ids
        that follow. It stops with its ``stop_at``-th token by id, with its ``text_at``-th by text.
        ``late``: it draws under masks, which its node has to have room for (MASK_BYTES of the oracle).
        """
        if late and not self._house.nodes[node].masks:
            raise ValueError(f"node {node} has no room for masks: set its mask_bytes to {MASK_BYTES}")
        if isinstance(prompt, int):
            tokens = np.random.Generator(np.random.PCG64(self._random.getrandbits(64)))
            prompt = tokens.integers(0, _TOKENS, prompt, np.int32)
        request = self._next
        self._next += count
        ask = Ask(request, prompt, max_tokens, node, count, stop_at, text_at, refused, late)
        self.clock.at(at_ns, lambda: self.gateway.submit(ask))
        return request

    def abort(self, at_ns: int, request: int) -> None:
        """The gateway ends the request whose first sequence is ``request``, at ``at_ns``, with an error."""
        self.clock.at(at_ns, lambda: self.gateway.abort(request))

    def disconnect(self, at_ns: int, request: int) -> None:
        """The client of the request whose first sequence is ``request`` leaves at ``at_ns``."""
        self.clock.at(at_ns, lambda: self.gateway.disconnect(request))

    def run(self, until_ns: int | None = None, progress: Callable[[int], None] | None = None) -> Outcome:
        """Run until nothing more happens, or until ``until_ns``; ``progress`` hears the time now and then.

        Raises Broken, or what the house itself raises, when an invariant does not hold.
        """
        clock, deaths, most = self.clock, self._deaths, self._most_events
        while True:
            due = clock.next_at
            if due is None:
                break
            if until_ns is not None and due > until_ns:
                return self._outcome()
            if deaths and clock.events >= deaths[-1].event:
                self._die(deaths.pop())
                continue
            clock.step()
            if most is not None and clock.events > most:
                raise Broken("progress", f"the house does not come to rest in {most} events")
            if progress is not None and clock.events % _PROGRESS_EVENTS == 0:
                progress(clock.now)
        self._check_rest()
        return self._outcome()

    # ---- cells come and go -------------------------------------------------------------------

    def _start(self) -> None:
        """A new cell, with rings and slabs of its own."""
        clock = self.clock
        prompts = VirtualSlab("prompts", self._prompts)
        wake = self.gateway.wake

        def wake_leader() -> None:
            cell.leader.wake()

        admissions: Channel[bytes] = Channel(clock, self._delay, self._records, wake_leader, wake)
        tokens: Channel[bytes] = Channel(clock, self._delay, self._records, wake, wake_leader)
        cell = self.cell = Cell(self._house, admissions, tokens, prompts)
        self.gateway.ready(admissions, tokens, prompts)

    def _die(self, death: Death) -> None:
        cell = self.cell
        if cell is not None:
            self._notice_ns = death.notice_ns
            cell.kill(death.rank % self._house.ranks, f"rank {death.rank % self._house.ranks} died")

    _notice_ns = 0

    def _on_death(self, cell: Cell, reason: str) -> None:
        """A rank is gone: its whole cell is killed once that is noticed, and comes back later."""
        notice_ns, self._notice_ns = self._notice_ns, 0
        if self.faults.restart_ns >= 0:
            self.clock.after(notice_ns, lambda: self._bury(cell, reason))

    def _bury(self, cell: Cell, reason: str) -> None:
        cell.end()
        self.cell = None
        self._restarts += 1
        self.gateway.lost(reason)
        self.clock.after(self.faults.restart_ns, self._start)

    def _hog(self, hog: Hog) -> None:
        cell = self.cell
        if cell is None or cell.doomed:
            return
        leader = cell.leader
        node = hog.node % len(self._house.nodes)
        ledger = leader.scheduler.nodes[node].ledger
        count = min(hog.pages, ledger.available)
        if count < 1:
            return
        ledger.promise(count)
        pages = ledger.take(count).copy()
        leader.hogs[node] += 1
        cell.plans.hog(node, pages.tolist(), hold=True)

        def give_back() -> None:
            if cell.ended:
                return
            cell.plans.hog(node, pages.tolist(), hold=False)
            ledger.give(pages)
            leader.hogs[node] -= 1
            leader.wake()

        self.clock.after(hog.for_ns, give_back)

    # ---- what is kept ------------------------------------------------------------------------

    def _on_event(self, event: TokenEvent) -> None:
        if self._keep:
            self._events.append(event)
        self.on_token(event)

    def _on_step(self, record: StepRecord) -> None:
        self._landed += 1
        if self._keep:
            self._steps.append(record)
        self.on_landed(record)

    def _check_rest(self) -> None:
        """Nothing will happen any more: nobody may wait, nothing may be held."""
        cell = self.cell
        if cell is None:
            return
        if not cell.idle or cell.doomed:
            raise Broken(
                "deadlock",
                f"nothing happens any more, and {cell.scheduler.statistics()} are not done;"
                f" {cell.collectives.missing()}",
            )
        cell.check_idle()
        self.gateway.check_idle()
        if self.gateway.unexplained:
            raise Broken("failure", self.gateway.unexplained[0])

    def _outcome(self) -> Outcome:
        return Outcome(self._events, self._steps, self.statistics())

    def statistics(self) -> WorldStatistics:
        """Counts so far."""
        if self.cell is None:
            raise RuntimeError("the cell is being restarted: run on")
        return WorldStatistics(
            self.clock.events, self._landed, self._restarts, self.cell.scheduler.statistics()
        )
