"""The daemon's side of everything shared: it creates, hands out, poisons and replaces, and never reads a
message.

Doorbells and the board belong to names and outlive restarts; a ring, slab or step ring that a dead actor
touched is poisoned and replaced, since nobody knows what the dead was about to write.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from actors.frames import Attachment, Boot
from actors.wiring import ActorSpec, ChannelSpec, Link, SlabSpec, Wiring
from shm.board import Board
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
        self.lines = {name: self._board.line(i) for i, name in enumerate(self._names)}

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
            line = self.lines[name]
            line.beat = line.stage = line.step = line.pid = 0
            line.stage_name = ""

    def boot(
        self, spec: ActorSpec, *, generation: int, path: tuple[str, ...], loop: str
    ) -> tuple[Boot, tuple[int, ...]]:
        """The first frame of an actor that is about to be spawned, and the descriptors it inherits."""
        ends = self._hand_out(spec.name, [s for s in self._shared if spec.name in s.link.actors])
        doorbells = {name: self._doorbells[name].fd for name in sorted({spec.name, *self._peers[spec.name]})}
        boot = Boot(
            name=spec.name,
            cell=spec.cell,
            generation=generation,
            target=spec.target,
            config=spec.config,
            path=path,
            loop=loop,
            board=self._board.segment.fd,
            lines={name: line.index for name, line in self.lines.items()},
            doorbells=doorbells,
            fds=spec.fds,
            # an inherited descriptor has the same number in the child
            attachments=tuple(
                msgspec.structs.replace(end, fd=ends.descriptors[end.fd]) for end in ends.attachments
            ),
        )
        return boot, (boot.board, *doorbells.values(), *spec.fds.values(), *ends.descriptors)

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
