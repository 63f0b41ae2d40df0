"""A cell: the ranks of one generation, their step ring and slabs, and the ways in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mstar.simulation.channels import Channel, Delay, VirtualSlab, VirtualSteps
from mstar.simulation.clock import VirtualClock
from mstar.simulation.cost import StepCost
from mstar.simulation.device import Collectives
from mstar.simulation.faults import Faults, Planted
from mstar.simulation.invariants import Broken, RankAudit
from mstar.simulation.oracle import Oracle
from mstar.simulation.plan_audit import PlanAudit
from mstar.simulation.ranks import KEPT_STEPS, FollowerRank, LeaderRank, Rank, StepRecord
from mstar.worker.budget import StepWork
from mstar.worker.limits import Limits
from mstar.worker.scheduler import MicroScheduler
from shm.steps import StepLayout

__all__ = ["Cell", "House", "StepRecord"]


class House(NamedTuple):
    """What all generations of a cell share: how the world is built, and whom a cell tells what happens.

    ``groups[k]`` are the ranks that run node ``k`` in lockstep. ``inline``: a rank is its device, as on CPU.
    ``slots`` are those of the step ring, ``replays`` the blocks for preempted rows.
    """

    clock: VirtualClock
    nodes: tuple[Limits, ...]
    groups: tuple[tuple[int, ...], ...]
    ranks: int
    cost: StepCost
    faults: Faults
    planted: Planted
    oracle: Oracle
    inline: bool
    slots: int
    replays: int
    salt: bytes
    ring_delay: Delay
    on_step: Callable[[StepRecord], None]
    on_death: Callable[[Cell, str], None]


class Cell:
    """One generation: ranks, a step ring, slabs, the ways in and out."""

    def __init__(
        self, house: House, admissions: Channel[bytes], tokens: Channel[bytes], prompts: VirtualSlab
    ) -> None:
        self.house = house
        self.admissions = admissions
        self.tokens = tokens
        self.prompts = prompts
        self.replays = VirtualSlab("replays", house.replays)
        self.ended = False
        self.doomed = False
        self.plans = PlanAudit(house.nodes)
        self.audit = RankAudit(house.ranks)
        self.collectives = Collectives(house.clock, house.cost, house.groups)
        self.works: list[StepWork] = [StepWork(0, 0, 0)] * KEPT_STEPS
        self.short_of_memory: dict[int, int] = {}
        layout = StepLayout(
            max_rows=max(limits.slots for limits in house.nodes),
            max_grants=max(_most_grants(limits) for limits in house.nodes),
            tail_bytes=max(limits.tail_bytes for limits in house.nodes),
            slots=house.slots,
            readers=house.ranks - 1,
        )
        self.steps = VirtualSteps(house.clock, layout, self._on_done)
        self.leader = LeaderRank(self)
        self.ranks: list[Rank] = [self.leader, *(FollowerRank(self, rank) for rank in range(1, house.ranks))]

    def kill(self, rank: int, reason: str) -> None:
        """Rank ``rank`` is gone, and with it the cell, as soon as somebody notices."""
        self.ranks[rank].die()
        if not self.doomed:
            self.doomed = True
            self.house.on_death(self, reason)

    def end(self) -> None:
        """Every rank is killed."""
        self.ended = True
        for rank in self.ranks:
            rank.die()

    @property
    def scheduler(self) -> MicroScheduler:
        """The leader's."""
        return self.leader.scheduler

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, is in flight, lent or unsent, on any rank."""
        return self.scheduler.idle and not self.leader.unsent

    def check_idle(self) -> None:
        """Everything is back. Raises Broken."""
        for index, node in enumerate(self.scheduler.nodes):
            ledger = node.ledger
            ledger.check()
            pages = ledger.statistics()
            if pages.held or pages.promised or pages.free + pages.cached != pages.total:
                raise Broken("idle", f"node {index} is idle with {pages}")
            if node.slots.free != node.limits.slots or len(node.line) or node.running:
                raise Broken("idle", f"node {index} is idle with {node.slots.free} slots free")
        if len(self.replays) or self.scheduler.pipeline.retiring:
            raise Broken("idle", f"{len(self.replays)} replays are leased while the cell is idle")
        self.audit.idle()
        self.plans.idle()
        for rank in self.ranks:
            rank.check_idle()

    def _on_done(self) -> None:
        self.leader.wake()


def _most_grants(limits: Limits) -> int:
    """As many pages as a step may hand out."""
    pages = limits.pages_of(limits.batch_tokens) + 2 * limits.slots
    return pages + limits.pages_of(limits.max_seq_len)
