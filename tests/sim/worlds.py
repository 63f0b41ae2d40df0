"""Small worlds for the tests of the simulator."""

from __future__ import annotations

from typing import Any

from mstar.messages.tokens import ERROR, RUNNING
from mstar.simulation.faults import NO_FAULTS, Faults
from mstar.simulation.schedule import LinearCost
from mstar.simulation.world import Outcome, World
from mstar.worker.limits import Limits

__all__ = ["LIMITS", "ends", "tokens_of", "world"]

LIMITS = Limits(
    slots=4,
    max_seq_len=64,
    pages=64,
    page_size=4,
    batch_tokens=12,
    min_chunk_tokens=4,
    depth=1,
    max_waiting=64,
    tail_bytes=4096,
)


def world(limits: Any = LIMITS, *, faults: Faults = NO_FAULTS, **named: Any) -> World:
    """A world in which steps cost 10 us and messages are up to 3 us late."""
    settings: dict[str, Any] = {
        "cost": LinearCost(10_000, 100, 1_000),
        "channel_delay_ns": 3_000,
        "ring_delay_ns": 3_000,
        "most_events": 20_000,
        **named,
    }
    return World(limits, faults=faults, **settings)


def ends(outcome: Outcome) -> dict[int, int]:
    """How each sequence ended."""
    return {event.request: event.finish for event in outcome.events if event.finish != RUNNING}


def tokens_of(outcome: Outcome, request: int) -> int:
    """How many tokens a sequence got."""
    return sum(event.request == request and event.finish != ERROR for event in outcome.events)
