"""Virtual devices: a compute stream per rank, and collectives in which every rank of a group must meet.

A stream runs its steps one after the other. The step of a group starts once it is at the head of every
stream of the group, as kernels of a collective do: ranks that launch in different orders, or a rank that
never comes, wait forever here, and the run says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mstar.engine.device import StepFailed
from mstar.engine.results import ResultRing, ResultSlot
from mstar.messages.step import StepPlan
from mstar.simulation.clock import RankClock, VirtualClock
from mstar.simulation.cost import StepCost
from mstar.simulation.invariants import Broken
from mstar.worker.budget import StepWork

__all__ = ["Collectives", "Stream", "VirtualDevice"]


class Launched(NamedTuple):
    """A step on a stream: what must be equal on every rank of its group, and its cost's terms."""

    seq: int
    node: int
    rows: bytes
    tokens: bytes
    work: StepWork
    ready_ns: int


class _Meeting:
    """The ranks that have come to one step so far."""

    __slots__ = ("arrived", "first", "started")

    def __init__(self, first: Launched) -> None:
        self.first = first
        self.arrived: list[Stream] = []
        self.started = 0


class Collectives:
    """Where the streams of a cell meet. ``groups[node]`` are the ranks that run the node in lockstep."""

    def __init__(self, clock: VirtualClock, cost: StepCost, groups: tuple[tuple[int, ...], ...]) -> None:
        self.clock = clock
        self.groups = groups
        self._cost = cost
        self._meetings: dict[int, _Meeting] = {}
        self._running: dict[int, list[Stream]] = {}

    def arrive(self, stream: Stream, launched: Launched) -> None:
        """``launched`` is at the head of ``stream``. Raises Broken if ranks differ in what they bring."""
        seq, node = launched.seq, launched.node
        group = self.groups[node]
        if len(group) == 1:
            self._start(launched, [stream])
            return
        if self._meetings and seq not in self._meetings:
            self._check_order(stream, launched)
        meeting = self._meetings.get(seq)
        if meeting is None:
            meeting = self._meetings[seq] = _Meeting(launched)
        else:
            _compare(meeting, stream, launched)
        meeting.arrived.append(stream)
        if len(meeting.arrived) == len(group):
            del self._meetings[seq]
            self._start(launched, meeting.arrived)

    def missing(self) -> str:
        """Who waits for whom, for the message of a run that hangs."""
        told = []
        for seq, meeting in self._meetings.items():
            here = sorted(stream.rank for stream in meeting.arrived)
            group = self.groups[meeting.first.node]
            told.append(f"step {seq}: ranks {here} wait for {sorted(set(group) - set(here))}")
        for seq, streams in self._running.items():
            dead = [stream.rank for stream in streams if stream.dead]
            if dead:
                told.append(f"step {seq}: ranks {[s.rank for s in streams if not s.dead]} wait for {dead}")
        return "; ".join(told) or "no collective is open"

    def _check_order(self, stream: Stream, launched: Launched) -> None:
        """Another step of the same ranks is open: NCCL would hang here, or worse, add up the wrong things."""
        group = self.groups[launched.node]
        for seq, meeting in self._meetings.items():
            if stream.rank in self.groups[meeting.first.node] and stream not in meeting.arrived:
                other = meeting.arrived[0]
                if other.rank in group:
                    raise Broken(
                        "collective",
                        f"rank {stream.rank} is at step {launched.seq} while rank {other.rank} is at"
                        f" step {seq}",
                    )

    def _start(self, launched: Launched, streams: list[Stream]) -> None:
        started = self.clock.now
        for stream in streams:
            stream.start(launched.seq)
        slowest = max(stream.slowness for stream in streams)
        took = round(self._cost.ns(launched.work, len(streams)) * slowest)
        seq = launched.seq
        self._running[seq] = streams

        def end() -> None:
            if any(stream.dead for stream in streams):
                return  # a kernel of a collective whose peer is gone never ends
            del self._running[seq]
            for stream in streams:
                stream.finish(seq, started)

        self.clock.at(started + took, end)


def _compare(meeting: _Meeting, stream: Stream, launched: Launched) -> None:
    first, other = meeting.first, meeting.arrived[0].rank
    for field in ("seq", "node", "rows", "tokens"):
        mine, theirs = getattr(launched, field), getattr(first, field)
        if mine != theirs:
            raise Broken(
                "collective",
                f"step {launched.seq}: {field} differ between rank {other} and rank {stream.rank}:"
                f" {_told(theirs)} and {_told(mine)}",
            )


def _told(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


class Stream:
    """The compute stream of one rank. ``on_start`` and ``on_finish`` hear of steps that begin and end."""

    def __init__(self, rank: int, collectives: Collectives, clock: RankClock, slowness: float) -> None:
        self.rank = rank
        self.slowness = slowness
        self.dead = False
        self.started = 0
        self.on_start: Callable[[int], None] = lambda seq: None
        self.on_finish: Callable[[int], None] = lambda seq: None
        self._collectives = collectives
        self._clock = clock
        self._queue: deque[tuple[Launched, ResultSlot]] = deque()

    def launch(self, launched: Launched, results: ResultSlot) -> None:
        """Append a step."""
        self._queue.append((launched, results))
        if len(self._queue) == 1:
            self._head()

    def busy_with(self, seq: int) -> bool:
        """Whether step ``seq`` has been launched here and has not ended."""
        return any(launched.seq == seq for launched, _ in self._queue)

    def landed(self, seq: int) -> bool:
        """Whether step ``seq`` and all before it have ended here."""
        return not self._queue or self._queue[0][0].seq > seq

    def start(self, seq: int) -> None:
        """The step at the head begins; what it draws first is there at once."""
        self.started = seq
        self.on_start(seq)

    def finish(self, seq: int, started: int) -> None:
        """The step at the head has ended."""
        launched, results = self._queue.popleft()
        if launched.seq != seq:
            raise Broken("stream", f"rank {self.rank} ended step {seq} before step {launched.seq}")
        results.elapsed_ns = self._clock.between(started)
        if self._queue:
            self._head()
        self.on_finish(seq)

    def die(self) -> None:
        """The rank is gone; what it launched never ends."""
        self.dead = True

    def _head(self) -> None:
        launched = self._queue[0][0]
        clock = self._collectives.clock
        if launched.ready_ns > clock.now:
            clock.at(launched.ready_ns, lambda: self._arrive(launched))
        else:
            self._arrive(launched)

    def _arrive(self, launched: Launched) -> None:
        if not self.dead:
            self._collectives.arrive(self, launched)


Forward = Callable[[StepPlan, ResultSlot], None]


class VirtualDevice:
    """A device beside its host, like a GPU: launching returns at once, a step lands when its stream says so.

    With ``lockstep`` a forward that fails ends the rank instead of the batch.
    """

    def __init__(self, slots: int, depth: int, forward: Forward, stream: Stream, *, lockstep: bool) -> None:
        self._results = ResultRing(slots, depth)
        self._forward = forward
        self._stream = stream
        self._lockstep = lockstep
        self._launched = 0

    def launch(self, plan: StepPlan, refused: Mapping[int, str]) -> None:
        """Run ``plan``'s rows; ``refused`` goes with the results."""
        results = self._results.begin(plan.seq)
        self._launched = plan.seq
        if plan.request.size:
            try:
                self._forward(plan, results)
            except StepFailed as error:
                if self._lockstep:
                    raise
                results.failed = str(error)
        if refused:
            results.failed_slots = dict(refused)

    def landed(self, seq: int, *, flush: bool) -> ResultSlot | None:
        """The results of ``seq``, or None while it runs."""
        if seq > self._launched or not self._stream.landed(seq):
            return None
        return self._results.read(seq)

    def drawn(self, seq: int) -> ResultSlot | None:
        """What rows drew late in ``seq``, once it has begun."""
        if seq > self._launched or not (self._stream.started >= seq or self._stream.landed(seq)):
            return None
        return self._results.read(seq)
