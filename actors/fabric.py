"""The daemon's side of everything shared: it creates, hands out, poisons and replaces, and never reads a
message.

Doorbells and the board belong to names and outlive restarts; a ring, slab or step ring that a dead actor
touched is poisoned and replaced, since nobody knows what the dead was about to write.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from actors.frames import Attachment
from actors.wiring import ChannelSpec, Link, SlabSpec, Wiring
from shm.board import Board, Line
from shm.doorbell import Doorbell
from shm.ring import Ring
from shm.segment import Poison, Segment
from shm.slab import SlabPool
from shm.steps import StepLayout, StepRing

__all__ = ["Fabric", "FabricStatistics", "Handout"]


class FabricStatistics(NamedTuple):
    """Shared objects, their bytes, and how many were replaced since the start."""

    objects: int
    nbytes: int
    replaced: int


class Handout(NamedTuple):
    """Ends for one actor. An attachment's `fd` is its place in `descriptors`, which remain the fabric's."""

    attachments: tuple[Attachment, ...]
    descriptors: tuple[int, ...]


class _Shared:
    """One link's memory. `generation` counts replacements; `stale` means poisoned and not replaced yet."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.generation = 1
        self.stale = False
        self.segment = _create(link, 1)

    def renew(self) -> None:
        old = self.segment
        self.generation += 1
        self.segment = _create(self.link, self.generation)
        self.stale = False
        old.close()


class Fabric:
    """Creates everything a wiring declares. Raises shm's NoSharedMemory, and leaves nothing behind then."""

    def __init__(self, wiring: Wiring) -> None:
        self._names = [actor.name for actor in wiring.actors]
        self._shared: list[_Shared] = []
        self._held: dict[tuple[str, tuple[str, str]], int] = {}
        self._replaced = 0
        self._board = Board.create(len(self._names))
        self._doorbells: dict[str, Doorbell] = {}
        self._peers = {name: wiring.peers(name) for name in self._names}
        try:
            for name in self._names:
                self._doorbells[name] = Doorbell.create()
            for link in wiring.links():
                self._shared.append(_Shared(link))
        except BaseException:
            self.close()
            raise
        self._lines = {name: self._board.line(i) for i, name in enumerate(self._names)}

    @property
    def board(self) -> int:
        """The board's descriptor."""
        return self._board.segment.fd

    @property
    def lines(self) -> dict[str, Line]:
        return self._lines

    def doorbells(self, actor: str) -> dict[str, int]:
        """The descriptors of an actor's own doorbell and its peers'."""
        return {name: self._doorbells[name].fd for name in sorted({actor, *self._peers[actor]})}

    def poison(self, actors: Collection[str]) -> None:
        """Give up what these actors touch, and wake everybody to see it."""
        for shared in self._shared:
            if not shared.stale and not set(shared.link.actors).isdisjoint(actors):
                shared.segment.poison(Poison.PEER_LOST)
                shared.stale = True
        for doorbell in self._doorbells.values():
            doorbell.ring()

    def renew(self, actors: Collection[str]) -> None:
        """Replace what was poisoned of these actors, who must be dead. Raises NoSharedMemory."""
        for shared in self._shared:
            if shared.stale and not set(shared.link.actors).isdisjoint(actors):
                shared.renew()
                self._replaced += 1
        for name in actors:
            line = self._lines[name]
            line.beat = line.stage = line.step = line.pid = 0
            line.stage_name = ""

    def everything(self, actor: str) -> Handout:
        """All ends of an actor that is about to be spawned."""
        return self._hand_out(actor, [s for s in self._shared if actor in s.link.actors])

    def missing(self, actor: str, peers: Collection[str]) -> Handout:
        """The ends of what `actor` shares with `peers` and was replaced since it was last handed out to
        `actor`.
        """
        return self._hand_out(
            actor,
            [
                shared
                for shared in self._shared
                if actor in shared.link.actors
                and not set(shared.link.actors).isdisjoint(peers)
                and self._held.get((actor, shared.link.key)) != shared.generation
                and not shared.stale
            ],
        )

    def close(self) -> None:
        """Close every descriptor and mapping."""
        for shared in self._shared:
            shared.segment.close()
        for doorbell in self._doorbells.values():
            doorbell.close()
        self._board.close()

    def statistics(self) -> FabricStatistics:
        return FabricStatistics(
            len(self._shared), sum(shared.segment.nbytes for shared in self._shared), self._replaced
        )

    def _hand_out(self, actor: str, chosen: list[_Shared]) -> Handout:
        for shared in chosen:
            self._held[actor, shared.link.key] = shared.generation
        return Handout(
            tuple(_end(shared.link, actor, place) for place, shared in enumerate(chosen)),
            tuple(shared.segment.fd for shared in chosen),
        )


def _create(link: Link, generation: int) -> Segment:
    spec = link.spec
    if isinstance(spec, ChannelSpec):
        return Ring.create(spec.capacity, reserved=spec.reserved, generation=generation).segment
    if isinstance(spec, SlabSpec):
        return SlabPool.create(spec.classes, generation=generation).segment
    return StepRing.create(StepLayout(*spec.layout), generation=generation).segment


def _end(link: Link, actor: str, place: int) -> Attachment:
    spec = link.spec
    kind, name = link.key
    first = actor == link.actors[0]
    if isinstance(spec, ChannelSpec):
        return Attachment(
            kind,
            name,
            "writer" if first else "reader",
            (spec.target if first else spec.source,),
            0,
            (),
            place,
        )
    if isinstance(spec, SlabSpec):
        peers = spec.users if first else (spec.owner,)
        return Attachment(kind, name, "owner" if first else "user", peers, 0, (), place)
    if first:
        return Attachment(kind, name, "writer", spec.readers, 0, spec.layout, place)
    return Attachment(kind, name, "reader", (spec.leader,), spec.readers.index(actor), spec.layout, place)
