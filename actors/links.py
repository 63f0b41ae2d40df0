"""What an actor shares with its peers, attached: rings, slabs, step rings, and the peers' bells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from actors.frames import Attachment
from shm.board import Line
from shm.doorbell import Doorbell
from shm.ring import Ring, RingReader, RingWriter
from shm.slab import SlabOwner, SlabPool, SlabUser
from shm.steps import StepLayout, StepReader, StepRing, StepWriter
from shm.wait import Bell

__all__ = ["Links"]

Slab = SlabOwner | SlabUser
Steps = StepWriter | StepReader


class Links:
    """The dictionaries stay the same objects for life; what they hold is replaced on a hand-over."""

    def __init__(self, lines: Mapping[str, Line], doorbells: Mapping[str, Doorbell]) -> None:
        self._doorbells = doorbells
        self.bells = {peer: Bell(lines[peer], bell) for peer, bell in doorbells.items()}
        self.inbox: dict[str, RingReader] = {}
        self.outbox: dict[str, RingWriter] = {}
        self.slabs: dict[str, Slab] = {}
        self.steps: dict[str, Steps] = {}
        self._memory: dict[tuple[str, str], Ring | SlabPool | StepRing] = {}
        self._progress: dict[str, _Progress] = {}

    def attach(self, attachments: Sequence[Attachment], descriptor: Callable[[int], int]) -> None:
        """Attach each of them in place of the one of that name; `descriptor` turns their `fd` into a number
        to own.

        What was attached before is unmapped once nothing views it any more. Raises shm's LayoutMismatch.
        """
        for end in attachments:
            key = (end.kind, end.name)
            old = self._memory.pop(key, None)
            self._memory[key] = self._attach(end, descriptor(end.fd))
            if old is not None:
                old.segment.close()

    def close(self) -> None:
        """Unmap everything."""
        for memory in self._memory.values():
            memory.segment.close()
        for doorbell in self._doorbells.values():
            doorbell.close()

    def polls(self) -> tuple[Callable[[], bool], ...]:
        """Whether something waits to be looked at, one question per thing that is read."""
        found: list[Callable[[], bool]] = [reader.has_data for reader in self.inbox.values()]
        found += [steps.has_data for steps in self.steps.values() if isinstance(steps, StepReader)]
        found += [progress.moved for progress in self._progress.values()]
        return tuple(found)

    def mark(self) -> None:
        """The actor is about to look: later progress of step readers counts as new."""
        for progress in self._progress.values():
            progress.mark()

    def _attach(self, end: Attachment, fd: int) -> Ring | SlabPool | StepRing:
        if end.kind == "channel":
            ring = Ring.attach(fd)
            (peer,) = end.peers
            if end.role == "writer":
                self.outbox[end.name] = RingWriter(ring, self.bells[peer])
            else:
                self.inbox[end.name] = RingReader(ring, self._doorbells[peer])
            return ring
        if end.kind == "slab":
            pool = SlabPool.attach(fd)
            self.slabs[end.name] = SlabOwner(pool) if end.role == "owner" else SlabUser(pool)
            return pool
        layout = StepLayout(*end.layout)
        steps = StepRing.attach(fd, layout)
        if end.role == "writer":
            writer = self.steps[end.name] = StepWriter(steps, [self.bells[peer] for peer in end.peers])
            if end.peers:
                self._progress[end.name] = _Progress(writer, len(end.peers))
        else:
            (leader,) = end.peers
            self.steps[end.name] = StepReader(steps, end.index, self.bells[leader])
        return steps


class _Progress:
    """Whether readers of a step ring have finished steps since the leader last looked.

    Compared with the last look, not with the moment of going to sleep: a reader that finishes in between
    finds the leader awake and does not ring.
    """

    __slots__ = ("_done", "_indices", "_words")

    def __init__(self, writer: StepWriter, readers: int) -> None:
        self._words = writer.ring.segment.words
        self._indices = [writer.ring.done_index(reader) + i for reader in range(readers) for i in (0, 1)]
        self._done: list[int] = []
        self.mark()

    def mark(self) -> None:
        words = self._words
        self._done = [words[i] for i in self._indices]

    def moved(self) -> bool:
        words = self._words
        return any(words[i] != done for i, done in zip(self._indices, self._done, strict=True))
