"""The wiring: which actors exist, and which rings, slabs and step rings join them.

A composition root declares it as data; the supervisor builds it. Names are unique per kind. A *cell* is the
set of actors that live and die together. A slab and a step ring join one cell or, for a slab, two: when a
cell dies, everything it touches is replaced, and nobody outside may lose memory by that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from actors.errors import WiringError

__all__ = ["MAX_LINKS", "ActorSpec", "ChannelSpec", "Link", "SlabSpec", "StepSpec", "Wiring"]

MAX_LINKS = 200  # descriptors that one SCM_RIGHTS datagram may carry: 253 in Linux (SCM_MAX_FD), with room


class ActorSpec(msgspec.Struct, frozen=True):
    """One process.

    target is "package.module:Class", an `Actor`. config is opaque to the runtime. env is added to the
    daemon's environment. fds are further descriptors of the daemon's process that the actor inherits, by
    name; they stay the daemon's, so a restarted actor inherits them again. stop_phase orders the stop: lower
    ones are told first and waited for; by default actors with `fds`, which face the outside, are 0 and the
    others 1.
    """

    name: str
    cell: str
    target: str
    config: bytes = b""
    env: dict[str, str] = {}
    fds: dict[str, int] = {}
    stop_phase: int | None = None

    @property
    def phase(self) -> int:
        if self.stop_phase is not None:
            return self.stop_phase
        return 0 if self.fds else 1


class ChannelSpec(msgspec.Struct, frozen=True):
    """A ring from one actor to another: capacity in bytes (a power of two), of which `reserved` are for
    control.
    """

    name: str
    source: str
    target: str
    capacity: int
    reserved: int = 65536


class SlabSpec(msgspec.Struct, frozen=True):
    """Leased blocks of one owner, read by others; classes are (block bytes, count)."""

    name: str
    owner: str
    users: tuple[str, ...]
    classes: tuple[tuple[int, int], ...]


class StepSpec(msgspec.Struct, frozen=True):
    """A cell's step ring; layout holds the fields of shm.steps.StepLayout, whose readers are len(readers)."""

    name: str
    leader: str
    readers: tuple[str, ...]
    layout: tuple[int, ...]


class Link(NamedTuple):
    """A channel, slab or step ring as the actors it joins; `key` is unique in a wiring."""

    key: tuple[str, str]
    spec: ChannelSpec | SlabSpec | StepSpec
    actors: tuple[str, ...]


class Wiring(msgspec.Struct, frozen=True):
    """Everything that is built. A start-up stage without progress for `stage_timeout` seconds fails its
    actor.
    """

    actors: tuple[ActorSpec, ...]
    channels: tuple[ChannelSpec, ...] = ()
    slabs: tuple[SlabSpec, ...] = ()
    steps: tuple[StepSpec, ...] = ()
    stage_timeout: float = 300.0

    def cells(self) -> dict[str, tuple[str, ...]]:
        """The actors of every cell, in the order of declaration."""
        found: dict[str, tuple[str, ...]] = {}
        for actor in self.actors:
            found[actor.cell] = (*found.get(actor.cell, ()), actor.name)
        return found

    def links(self) -> tuple[Link, ...]:
        """Every shared object with the actors it joins, writer, owner or leader first."""
        found = [Link(("channel", c.name), c, (c.source, c.target)) for c in self.channels]
        found += [Link(("slab", s.name), s, (s.owner, *s.users)) for s in self.slabs]
        found += [Link(("steps", s.name), s, (s.leader, *s.readers)) for s in self.steps]
        return tuple(found)

    def peers(self, actor: str) -> frozenset[str]:
        """The actors that share something with this one."""
        return frozenset(a for link in self.links() if actor in link.actors for a in link.actors) - {actor}

    def check(self) -> None:
        """Raise WiringError for what could not be built."""
        if not self.actors:
            raise WiringError("a wiring needs at least one actor, and this one has none")
        if not self.stage_timeout > 0:
            raise WiringError(f"stage_timeout must be more than 0 seconds, not {self.stage_timeout:g}")
        _unique("actor", (a.name for a in self.actors))
        cell = {a.name: a.cell for a in self.actors}
        for actor in self.actors:
            module, colon, name = actor.target.partition(":")
            if not (module and colon and name):
                raise WiringError(
                    f"actor {actor.name!r} has target {actor.target!r}; it must read 'package.module:Class'"
                )
        _unique("channel", (c.name for c in self.channels))
        _unique("slab", (s.name for s in self.slabs))
        _unique("step ring", (s.name for s in self.steps))
        links = self.links()
        for link in links:
            kind, name = link.key
            for known in link.actors:
                if known not in cell:
                    raise WiringError(
                        f"{kind} {name!r} names the actor {known!r}, which is not one of {sorted(cell)}"
                    )
            if len(set(link.actors)) != len(link.actors):
                raise WiringError(f"{kind} {name!r} names an actor twice: {list(link.actors)}")
        for slab in self.slabs:
            users = {cell[user] for user in slab.users} - {cell[slab.owner]}
            if len(users) > 1:
                raise WiringError(
                    f"slab {slab.name!r} has users in the cells {sorted(users)}; one cell's death would take "
                    "the others' blocks along, so declare one slab per cell"
                )
        for steps in self.steps:
            if len({cell[actor] for actor in (steps.leader, *steps.readers)}) > 1:
                raise WiringError(f"step ring {steps.name!r} leaves the cell of its leader {steps.leader!r}")
        load = Counter(actor for link in links for actor in link.actors)
        for name, count in load.items():
            if count > MAX_LINKS:
                raise WiringError(
                    f"actor {name!r} shares {count} objects; at most {MAX_LINKS} can be handed over"
                )


def _unique(kind: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise WiringError(f"{kind} {name!r} is declared {count} times; names must be unique")
