"""What an actor has of the world: its messages, its memory, its supervisor, and one way to wait.

Waiting is level-triggered: `wait` returns when there is something to look at, however it came about, and a
doorbell only ends a sleep early. One doorbell per actor, one reader callback in the loop, kept for life.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, TypeVar

from actors.actor import PeerEvent, PeerLost, PeerReady
from actors.errors import (
    ActorsError,
    AlreadyWaiting,
    AskFailed,
    ControlClosed,
    ControlCongested,
    ReportRefused,
)
from actors.frames import Answer, Ask, Boot, CellLost, CellReady, FromSupervisor, Ready, Stage, Status, Stop
from actors.handover import ControlSocket, ControlStatistics
from actors.links import Links
from actors.mailbox import Decoder, Mailbox
from shm.board import Board, Line
from shm.doorbell import Doorbell
from shm.wait import Sleeper, SleeperStatistics

__all__ = ["Context", "ContextStatistics", "LineStage"]

M = TypeVar("M")

_PULSE = 0.1  # seconds between heartbeats, and the longest sleep without a look
_CONFIRM = (
    0.005  # a producer preempted between publishing and ringing is given this long before it counts as lost
)
_YIELD_NS = 1_000_000  # an actor that always finds work lets its loop run this often
_MAX_ASKS = 64
_MAX_KINDS = 32
_MAX_DEFERRED = 256


class LineStage(IntEnum):
    """What a board line's `stage` says; its `stage_name` has the words."""

    NONE = 0
    STARTING = 1
    RUNNING = 2
    STOPPING = 3


class ContextStatistics(NamedTuple):
    """`lost` in `sleeper` counts wake-ups that only the safety poll noticed and must stay 0."""

    sleeper: SleeperStatistics
    control: ControlStatistics
    waits: int
    rings: int
    asks: int


class Context:
    """Everything an `Actor` works with. Not thread-safe, but for `stage`, `report` and `wake`.

    name, cell, config, generation: from the wiring and the supervisor. fds: inherited descriptors by name.
    line: the actor's own line of the board, whose `step` it may write. lines: everybody's, to read. inbox,
    outbox, slabs and steps hold the ends of what is shared, by name; after a `PeerReady` the names lead to
    the replacements. bells: per peer, for an actor that publishes by other means than a ring. stopping: the
    supervisor told it to finish; hastened: it did so again.
    """

    def __init__(
        self, boot: Boot, control: ControlSocket[FromSupervisor], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.name = boot.name
        self.cell = boot.cell
        self.generation = boot.generation
        self.config = boot.config
        self.fds = dict(boot.fds)
        self.loop = loop
        board = self._board = Board.attach(boot.board)
        self.lines: dict[str, Line] = {name: board.line(i) for name, i in boot.lines.items()}
        self.line = self.lines[boot.name]
        doorbells = {name: Doorbell.attach(fd) for name, fd in boot.doorbells.items()}
        self._bell = doorbells.pop(boot.name)
        self._links = Links(self.lines, doorbells)
        self._links.attach(boot.attachments, lambda fd: fd)
        self.inbox = self._links.inbox
        self.outbox = self._links.outbox
        self.slabs = self._links.slabs
        self.steps = self._links.steps
        self.bells = self._links.bells
        self.stopping = False
        self.hastened = False
        self.failed: asyncio.Future[None] = loop.create_future()

        self._control = control
        self._sleeper = Sleeper(self.line)
        self._watches: list[Callable[[], bool]] = []
        self._polls = self._links.polls()
        self._mailboxes: dict[str, list[Mailbox[object]]] = {}
        self._woken = False
        self._future: asyncio.Future[None] | None = None
        self._drain: Callable[[], bool] | None = None
        self._scheduled = False
        self._asleep = False
        self._yielded = 0
        self._stopped = asyncio.Event()
        self._on_peer: Callable[[PeerEvent], None] | None = None
        self._deferred: list[tuple[CellLost | CellReady, list[int]]] = []
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._ids = itertools.count(1)
        self._kinds: set[str] = set()
        self._waits = self._rings = self._asks = 0
        self._pulse_handle: asyncio.TimerHandle | None = None

    # To and from the supervisor

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """Say what the start-up is at, "loading" 3 of 12; repeated names are progress of one stage.

        A stage that says nothing for the wiring's `stage_timeout` fails the start.
        """
        self.line.stage_name = f"{name} {done}/{total}" if total else name
        self._control.post(f"stage {name}", Stage(name, done, total))

    def report(self, kind: str, payload: bytes) -> None:
        """Leave a small status payload with the supervisor; the latest of a kind counts.

        Raises ReportRefused beyond 32 kinds, and FrameTooLarge.
        """
        if kind not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:
                raise ReportRefused(
                    f"{kind!r} would be the kind of status {_MAX_KINDS + 1}; allowed are {_MAX_KINDS}"
                )
            self._kinds.add(kind)
        self._control.post(f"status {kind}", Status(kind, payload))

    async def ask(self, kind: str, payload: bytes = b"", *, timeout: float = 10.0) -> bytes:  # noqa: ASYNC109
        """Ask the supervisor a question. Raises AskFailed when it answers with an error or not within
        `timeout` s.
        """
        if len(self._asked) >= _MAX_ASKS:
            raise AskFailed(
                f"{_MAX_ASKS} questions to the supervisor are open, so {kind!r} must wait; ask fewer at once"
            )
        number = next(self._ids)
        future: asyncio.Future[bytes] = self.loop.create_future()
        self._asked[number] = future
        self._asks += 1
        try:
            self._control.send(Ask(number, kind, payload))
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise AskFailed(f"the supervisor did not answer {kind!r} within {timeout:g} s") from None
        finally:
            del self._asked[number]

    async def until_stopping(self) -> None:
        """Return once the supervisor has told this actor to finish."""
        await self._stopped.wait()

    # Messages

    def mailbox(self, channel: str, decoder: Decoder[M], handler: Callable[[M], None]) -> Mailbox[M]:
        """A mailbox on an inbox, which follows the inbox when it is replaced. Raises KeyError."""
        box = Mailbox(self.inbox[channel], decoder, handler, name=channel)
        self._mailboxes.setdefault(channel, []).append(box)  # type: ignore[arg-type]
        return box

    def watch(self, poll: Callable[[], bool]) -> None:
        """Let `wait` and `has_work` ask `poll` too: whether something the actor watches has come."""
        self._watches.append(poll)
        self._collect_polls()

    def has_work(self) -> bool:
        """Whether there is anything to look at now."""
        if self._woken:
            return True
        # a plain loop: this runs with every spin, and a generator would cost more than the polls
        for poll in self._polls:  # noqa: SIM110
            if poll():
                return True
        return False

    def wake(self) -> None:
        """End the current wait, or the next one; from any thread."""
        self._woken = True
        self._bell.ring()

    async def wait(self, spin_ns: int = 0) -> None:
        """Return when there is something to look at: a message, progress of a step reader, a peer event, a
        stop order, `wake`, or a rung doorbell; it may also return for nothing.

        Polls, spins for up to `spin_ns` with the loop held, then sleeps. An actor that always finds work lets
        its loop run once a millisecond. Raises AlreadyWaiting if another task waits, or if a callback is
        served.
        """
        if self._future is not None or self._drain is not None:
            who = "a callback is served" if self._drain is not None else "another task waits"
            raise AlreadyWaiting(
                f"actor {self.name!r} has one doorbell, and {who} already; wait in one place only"
            )
        self._waits += 1
        if self._sleeper.spin(self.has_work, spin_ns, time.perf_counter_ns) or not self._sleeper.announce(
            self.has_work
        ):
            now = time.perf_counter_ns()
            if now - self._yielded > _YIELD_NS:
                await asyncio.sleep(0)
                self._yielded = time.perf_counter_ns()
        else:
            self._future = self.loop.create_future()
            self._asleep = True
            try:
                await self._future
            finally:
                self._future = None
                self._asleep = False
                self._sleeper.awake()
                self._yielded = time.perf_counter_ns()
        self._woken = False
        self._links.mark()

    def serve(self, drain: Callable[[], bool]) -> None:
        """Have the loop call `drain` whenever there may be something to look at, instead of a task that
        waits.

        `drain` does a bounded amount of work and returns True to be called again soon; other callbacks of the
        loop run in between. What it raises ends the actor. For good, and instead of `wait`: raises
        AlreadyWaiting.
        """
        if self._future is not None or self._drain is not None:
            raise AlreadyWaiting(f"actor {self.name!r} has one doorbell, which is taken already")
        self._drain = drain
        self._schedule()

    # For the process that runs the actor

    def open(self) -> None:
        """Start listening to the doorbell and the control socket, and the heartbeat."""
        self.loop.add_reader(self._bell.fd, self._on_bell)
        self._control.attach(self.loop, self._on_frame, self._on_control_closed)
        self._pulse()

    def ready(self) -> None:
        """Tell the supervisor that the setup is finished."""
        self.line.stage = LineStage.RUNNING
        self.line.stage_name = "running"
        self._control.send(Ready())

    def deliver(self, on_peer: Callable[[PeerEvent], None]) -> None:
        """From now on give peer events to `on_peer`, first those that came during the setup."""
        self._on_peer = on_peer
        deferred, self._deferred = self._deferred, []
        for frame, descriptors in deferred:
            self._on_cell(frame, descriptors)

    def fail(self, error: BaseException) -> None:
        """End the actor with this error."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def close(self) -> None:
        """Stop listening, and let go of everything shared."""
        if self._pulse_handle is not None:
            self._pulse_handle.cancel()
        self.loop.remove_reader(self._bell.fd)
        self._bell.close()
        self._links.close()
        self._board.close()

    def statistics(self) -> ContextStatistics:
        return ContextStatistics(
            self._sleeper.statistics(), self._control.statistics(), self._waits, self._rings, self._asks
        )

    # Waking up

    def _on_bell(self) -> None:
        self._bell.drain()
        self._rings += 1
        self._rouse()

    def _rouse(self) -> None:
        if self._drain is not None:
            if not self._scheduled:
                self._pump()
        elif self._future is None:
            self._woken = True  # rung while the actor was at work: it may have looked before the ring's cause
        elif not self._future.done():
            self._future.set_result(None)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = self._asleep = False
        drain = self._drain
        if drain is None or self.failed.done():
            return
        self._sleeper.awake()
        self._woken = False
        self._links.mark()
        try:
            again = drain()
        except Exception as error:  # noqa: BLE001 - whatever the actor's code raises ends the actor, with its traceback
            self.fail(error)
            return
        if again or not self._sleeper.announce(self.has_work):
            self._schedule()
        else:
            self._asleep = True

    def _pulse(self) -> None:
        """Ten times a second: the heartbeat, and the safety poll of a sleeper."""
        self.line.beat = time.monotonic_ns()
        self._pulse_handle = self.loop.call_later(_PULSE, self._pulse)
        if not self._asleep or not self._sleeper.safety_poll(self.has_work, rung=True):
            return
        if self._bell.drain():
            self._rouse()
        else:
            self.loop.call_later(_CONFIRM, self._confirm, self.line.epoch)

    def _confirm(self, epoch: int) -> None:
        """Work was there without a ring; if it still is, in the same sleep, the wake-up was lost."""
        if not self._asleep or self.line.epoch != epoch:
            return
        rung = self._bell.drain() > 0
        if self._sleeper.safety_poll(self.has_work, rung=rung) or rung:
            self._rouse()

    # Frames

    def _on_frame(self, frame: FromSupervisor, descriptors: list[int]) -> None:
        if isinstance(frame, Answer):
            self._on_answer(frame)
        elif isinstance(frame, Stop):
            self.hastened = self.stopping
            self.stopping = True
            self.line.stage = LineStage.STOPPING
            self._stopped.set()
            self._rouse()
        elif isinstance(frame, CellLost | CellReady):
            if self._on_peer is None and len(self._deferred) >= _MAX_DEFERRED:
                self.fail(
                    ControlCongested(f"{_MAX_DEFERRED} peer events came during the setup of {self.name!r}")
                )
            elif self._on_peer is None:
                self._deferred.append((frame, descriptors))
            else:
                self._on_cell(frame, descriptors)

    def _on_answer(self, frame: Answer) -> None:
        future = self._asked.get(frame.id)
        if future is None or future.done():
            return
        if frame.error:
            future.set_exception(AskFailed(frame.error))
        else:
            future.set_result(frame.payload)

    def _on_cell(self, frame: CellLost | CellReady, descriptors: list[int]) -> None:
        if self._on_peer is None:
            return
        try:
            if isinstance(frame, CellReady):
                self._links.attach(frame.attachments, descriptors.__getitem__)
                self._collect_polls()
                for channel, boxes in self._mailboxes.items():
                    for box in boxes:
                        box.rebind(self.inbox[channel])
                for actor in frame.actors:
                    self._on_peer(PeerReady(actor, frame.cell, frame.generation))
            else:
                for actor in frame.actors:
                    self._on_peer(PeerLost(actor, frame.cell, frame.reason))
        except Exception as error:  # noqa: BLE001 - a peer event that could not be taken leaves nothing to go on with
            self.fail(error)
        self._rouse()

    def _on_control_closed(self) -> None:
        error: ActorsError = ControlClosed("the supervisor closed its end of the control socket")
        self.fail(error)

    def _collect_polls(self) -> None:
        self._polls = (*self._links.polls(), *self._watches)
