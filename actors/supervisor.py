"""The supervisor: starts the actors of a wiring, watches them, and restarts a cell when one of its actors
dies.

Everything it decides happens in `_tick`, every 25 ms (see pace.py): who has begun to die, who is reaped,
which stage stands still, which cell is due to start. Between ticks it only takes in what actors say. A cell
goes

    starting -> ready -> dying (poisoned, killed) -> waiting (back-off) -> starting with new memory

from wherever a death finds it. The peers of a dying cell hear of it at once and get the new memory's
descriptors when the cell is ready again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial

import anyio

from actors.answers import Answers
from actors.cell import Cell, CellState
from actors.errors import (
    ActorsError,
    CellGivenUp,
    ControlClosed,
    ControlCongested,
    NotMainThread,
    StartFailed,
)
from actors.events import (
    ActorEnded,
    ActorReady,
    ActorSpawned,
    CellDied,
    CellRestarting,
    CellStarted,
    StageEnded,
    StageReport,
    SupervisorEvent,
)
from actors.fabric import Fabric, FabricStatistics
from actors.frames import (
    CellLost,
    CellReady,
    Failed,
    FromActor,
    FromSupervisor,
    Ready,
    Stage,
    Status,
    Stop,
)
from actors.pace import BUSY, Pace
from actors.process import ActorProcess, ActorState, search_path
from actors.restarts import RestartPolicy
from actors.status import SupervisorStatistics, actor_statistics
from actors.wiring import Wiring
from shm.board import Line
from shm.errors import ShmError
from shm.segment import sweep

__all__ = ["Supervisor"]

_QUICK = 0.005
_MUTE = 1.0  # seconds from a closed control socket to the end of a process that closes
_REAP = 10.0  # seconds for killed processes to disappear before a failing start is reported all the same
_POLICY = RestartPolicy()
_SETTLED = (CellState.READY, CellState.ENDED)
_ENDING = (ActorState.STOPPING, ActorState.DYING)
_MAX_KINDS = 32


class Supervisor:
    """Runs in the daemon's main thread and event loop.

    on_event is called from the loop with everything that happens. answer gets an actor's question (actor,
    kind, payload) and returns the answer; what it raises reaches the asker as AskFailed. loop_factory is the
    actors' loop: "uvloop", "asyncio", or "auto" for uvloop where it is installed.
    """

    def __init__(
        self,
        wiring: Wiring,
        *,
        on_event: Callable[[SupervisorEvent], None],
        answer: Callable[[str, str, bytes], Awaitable[bytes]],
        loop_factory: str = "auto",
        policy: RestartPolicy = _POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        wiring.check()
        self.wiring = wiring
        self._on_event = on_event
        self._answers = Answers(answer)
        self._loop_factory = loop_factory
        self._clock = clock
        by_name = {spec.name: spec for spec in wiring.actors}
        self._cells = {
            name: Cell(name, tuple(by_name[actor] for actor in actors), policy)
            for name, actors in wiring.cells().items()
        }
        self._cell_of = {spec.name: self._cells[spec.cell] for spec in wiring.actors}
        self._peers = {spec.name: wiring.peers(spec.name) for spec in wiring.actors}
        self._fabric: Fabric | None = None
        self._fabric_statistics = FabricStatistics(0, 0, 0)
        self._started = False
        self._stopping = False
        self._stop_by = math.inf
        self._over: asyncio.Event | None = None
        self._failure: ActorsError | None = None
        self._pausing: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Create all shared memory, spawn every actor, and return when all are ready.

        Raises StartFailed, whose last line is the cause; shm's NoSharedMemory; NotMainThread. After a
        failure, or when cancelled, nothing is left running.
        """
        if threading.current_thread() is not threading.main_thread():
            raise NotMainThread(
                f"Supervisor.start was called in the thread {threading.current_thread().name!r}; "
                "actors die with the thread that starts them, so call it in the main thread"
            )
        sweep()
        try:
            self._fabric = Fabric(self.wiring)
            for cell in self._cells.values():
                self._spawn(cell, self._clock())
            while not all(cell.state is CellState.READY for cell in self._cells.values()):
                await self._pause(BUSY)
                if self._over is not None:
                    await self._over.wait()
                    raise StartFailed("", "the start was stopped before every actor was ready")
                self._tick()
                if self._failure is not None:
                    raise self._failure
            self._started = True
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._end_everything()
            raise

    async def serve(self) -> None:
        """Watch and restart until `stop`. Raises CellGivenUp when a cell dies too often; the rest runs on
        then.
        """
        pace = Pace(self._fabric.lines.values()) if self._fabric is not None else Pace(())
        while not self._stopping:
            self._tick()
            if self._failure is not None:
                raise self._failure
            settled = all(cell.state in _SETTLED for cell in self._cells.values())
            await self._pause(pace.interval(self._clock(), settled=settled))

    async def stop(self, grace: float, later: float | None = None) -> None:
        """Tell the actors to finish, phase by phase (`ActorSpec.stop_phase`), and wait.

        The first phase has `grace` seconds, each later one `later` (None: as many), then what is left of it
        is SIGKILLed. A second call hastens the first:
        its grace is counted from now and for all phases together. When cancelled it kills what is left.
        """
        if self._over is not None:
            self._stop_by = min(self._stop_by, self._clock() + grace)
            for process in list(self._living()):
                if process.state is ActorState.STOPPING:
                    self._tell(process, Stop())
            await self._over.wait()
            return
        self._over = asyncio.Event()
        self._stopping = True
        try:
            for phase in sorted({spec.phase for spec in self.wiring.actors}):
                await self._stop_phase(phase, grace)
                grace = grace if later is None else min(grace, later)
        finally:
            with anyio.CancelScope(shield=True):
                await self._end_everything()
            self._over.set()

    def reports(self, actor: str) -> dict[str, bytes]:
        """The latest status payload of each kind that a living actor reported. Raises KeyError for an unknown
        actor.
        """
        process = self._cell_of[actor].processes.get(actor)
        return {} if process is None else dict(process.reports)

    def statistics(self) -> SupervisorStatistics:
        now = self._clock()
        lines: dict[str, Line] = {}
        if self._fabric is not None:
            self._fabric_statistics = self._fabric.statistics()
            lines = self._fabric.lines
        return SupervisorStatistics(
            {
                spec.name: actor_statistics(spec.name, self._cell_of[spec.name], lines.get(spec.name), now)
                for spec in self.wiring.actors
            },
            {cell.name: str(cell.state) for cell in self._cells.values()},
            self._fabric_statistics,
        )

    # Deciding

    def _tick(self) -> None:
        now = self._clock()
        for process in list(self._living()):
            if process.state is not ActorState.DYING and process.dying():
                self._hear_out(process)
                self._ending(process)
            if process.state in _ENDING and process.reaped():
                self._gone(process)
            elif process.mute_since is not None and now - process.mute_since > _MUTE:
                process.verdict = "closed its control socket and lives on"
                self._ending(process)
        for cell in self._cells.values():
            if cell.state is CellState.STARTING:
                self._check_stages(cell, now)
            elif cell.state is CellState.DYING:
                self._check_dead(cell, now)
            elif cell.state is CellState.WAITING and self._started and not self._stopping and now >= cell.due:
                self._restart(cell, now)

    async def _pause(self, seconds: float) -> None:
        """Until the next look, or until something happened that is worth one."""
        loop = asyncio.get_running_loop()
        self._pausing = loop.create_future()
        timer = loop.call_later(seconds, self._nudge)
        try:
            await self._pausing
        finally:
            timer.cancel()

    def _nudge(self) -> None:
        if self._pausing is not None and not self._pausing.done():
            self._pausing.set_result(None)

    def _living(self) -> Iterator[ActorProcess]:
        for cell in self._cells.values():
            yield from cell.processes.values()

    def _check_stages(self, cell: Cell, now: float) -> None:
        limit = self.wiring.stage_timeout
        for process in cell.processes.values():
            age = now - process.progress
            if process.state is ActorState.STARTING and age > limit:
                process.verdict = f"made no progress for {age:.1f} s (stage_timeout is {limit:g} s)"
                self._lose(process)
                return

    def _ending(self, process: ActorProcess) -> None:
        """A process has begun to die, or has to."""
        if process.state is ActorState.STOPPING:
            process.state = ActorState.DYING
            process.kill()
        elif process.state is not ActorState.DYING:
            self._lose(process)

    def _lose(self, process: ActorProcess) -> None:
        """Take a cell down because of one actor: poison, ring, tell the peers, kill the rest."""
        cell = self._cell_of[process.spec.name]
        if cell.state is CellState.DYING:
            return
        # An actor often fails because its mate was killed a moment before: then the mate is the cause.
        mates = [
            mate
            for mate in cell.processes.values()
            if mate is not process and mate.dying() and mate.signalled
        ]
        culprit = mates[0] if mates else process
        cell.state = CellState.DYING
        cell.died = self._clock()
        cell.culprit = culprit.spec.name
        cell.cause = culprit.cause()
        if self._fabric is not None:
            self._fabric.poison(cell.actors)
        for other in list(self._living()):
            lost = tuple(actor for actor in cell.actors if actor in self._peers[other.spec.name])
            if other.spec.cell != cell.name and lost:
                self._tell(other, CellLost(cell.name, lost, cell.cause))
        for member in cell.processes.values():
            member.state = ActorState.DYING
            member.kill()
        self._on_event(CellDied(cell.name, cell.culprit, cell.cause))

    def _gone(self, process: ActorProcess) -> None:
        """A process is reaped."""
        cell = self._cell_of[process.spec.name]
        self._hear_out(process)
        process.close()
        del cell.processes[process.spec.name]
        cause = process.cause()
        if process.spec.name == cell.culprit:
            cell.cause = cause
            cell.traceback = process.failure.traceback if process.failure is not None else ""
        self._on_event(ActorEnded(process.spec.name, cell.name, process.pid, cause))
        if cell.state is not CellState.DYING and not cell.processes:
            cell.state = CellState.ENDED

    def _check_dead(self, cell: Cell, now: float) -> None:
        """Once a cell is dead and reaped: fail the start, start it again, or give it up."""
        if not self._started and not self._stopping:
            if not cell.processes or now - cell.died > _REAP:
                self._failure = self._failure or StartFailed(cell.culprit, cell.cause, cell.traceback)
        elif cell.processes:
            return
        elif self._stopping:
            cell.state = CellState.ENDED
        elif (delay := cell.book.died(now)) is None:
            cell.state = CellState.ENDED
            self._failure = CellGivenUp(cell.name, cell.book.deaths, cell.cause, cell.traceback)
        else:
            cell.state = CellState.WAITING
            cell.due = now + delay
            self._on_event(
                CellRestarting(cell.name, cell.generation + 1, cell.book.deaths, delay, cell.cause)
            )

    # Acting

    def _restart(self, cell: Cell, now: float) -> None:
        try:
            if self._fabric is not None:
                self._fabric.renew(cell.actors)
            self._spawn(cell, now)
        except (OSError, ShmError) as error:
            for process in cell.processes.values():
                process.state = ActorState.DYING
                process.kill()
            cell.state = CellState.DYING
            cell.culprit, cell.traceback = "", ""
            cell.cause = f"cell {cell.name} could not be started: {error}"

    def _spawn(self, cell: Cell, now: float) -> None:
        fabric = self._fabric
        if fabric is None:
            return
        cell.generation += 1
        cell.state = CellState.STARTING
        cell.spawned = now
        cell.culprit = cell.cause = cell.traceback = ""
        loop = asyncio.get_running_loop()
        for spec in cell.specs:
            boot, inherited = fabric.boot(
                spec, generation=cell.generation, path=search_path(), loop=self._loop_factory
            )
            process = ActorProcess(spec, boot, inherited, now)
            cell.processes[spec.name] = process
            process.control.attach(loop, partial(self._on_frame, process), partial(self._on_mute, process))
            self._on_event(ActorSpawned(spec.name, cell.name, process.pid, cell.generation))
        for other in self._cells.values():
            if other.state is CellState.READY:
                self._announce(other, cell.processes.values())

    def _announce(self, cell: Cell, receivers: Iterable[ActorProcess]) -> None:
        """Tell these processes that a cell is ready, and hand them what was replaced between them and it."""
        if self._fabric is None:
            return
        for process in list(receivers):
            name = process.spec.name
            found = tuple(actor for actor in cell.actors if actor in self._peers[name])
            if found and process.state is not ActorState.DYING:
                ends = self._fabric.missing(name, cell.actors)
                frame = CellReady(cell.name, found, cell.generation, ends.attachments)
                self._tell(process, frame, ends.descriptors)

    def _tell(self, process: ActorProcess, frame: FromSupervisor, descriptors: Sequence[int] = ()) -> None:
        try:
            process.control.send(frame, descriptors)
        except ControlCongested as error:
            process.verdict = f"does not listen to its supervisor: {error}"
            self._ending(process)

    async def _stop_phase(self, phase: int, grace: float) -> None:
        members = [process for process in self._living() if process.spec.phase == phase]
        for process in members:
            if process.state is not ActorState.DYING:
                process.state = ActorState.STOPPING
                self._tell(process, Stop())
        deadline = self._clock() + grace
        while any(process in members for process in self._living()):
            if self._clock() >= min(deadline, self._stop_by):
                for process in members:
                    process.kill()
            await asyncio.sleep(_QUICK)
            self._tick()

    async def _end_everything(self) -> None:
        """SIGKILL what lives, reap it, and close all memory."""
        for cell in self._cells.values():
            cell.state = CellState.ENDED
        for process in self._living():
            process.state = ActorState.DYING
            process.kill()
        deadline = self._clock() + _REAP
        try:
            while any(cell.processes for cell in self._cells.values()) and self._clock() < deadline:
                for process in list(self._living()):
                    if process.reaped():
                        self._gone(process)
                await asyncio.sleep(_QUICK)
        finally:
            self._answers.close()
            if self._fabric is not None:
                self._fabric_statistics = self._fabric.statistics()
                self._fabric.close()
                self._fabric = None

    # Listening

    def _hear_out(self, process: ActorProcess) -> None:
        """Read what a process said before it ended."""
        try:
            while (received := process.control.receive()) is not None:
                self._on_frame(process, *received)
        except ControlClosed:
            return

    def _on_mute(self, process: ActorProcess) -> None:
        process.mute_since = self._clock()
        self._nudge()

    def _on_frame(self, process: ActorProcess, frame: FromActor, descriptors: list[int]) -> None:
        if isinstance(frame, Stage):
            self._on_stage(process, frame)
        elif isinstance(frame, Ready):
            self._on_ready(process)
        elif isinstance(frame, Failed):
            process.failure = frame
            if process.state is not ActorState.STOPPING:
                self._ending(process)
        elif isinstance(frame, Status):
            if frame.kind in process.reports or len(process.reports) < _MAX_KINDS:
                process.reports[frame.kind] = frame.payload
        else:
            self._answers.put(process.spec.name, frame, partial(self._tell, process))

    def _on_stage(self, process: ActorProcess, frame: Stage) -> None:
        now = self._clock()
        spec, previous = process.spec, process.stage
        took = process.advance(frame, now)
        if took is not None:
            self._on_event(StageEnded(spec.name, spec.cell, previous, took))
        seconds = now - process.stage_since
        self._on_event(StageReport(spec.name, spec.cell, frame.name, frame.done, frame.total, seconds))

    def _on_ready(self, process: ActorProcess) -> None:
        if process.state is not ActorState.STARTING:
            return
        now = self._clock()
        spec = process.spec
        process.state = ActorState.READY
        self._on_event(StageEnded(spec.name, spec.cell, process.stage, now - process.stage_since))
        process.advance(Stage("running", 0, 0), now)
        self._on_event(ActorReady(spec.name, spec.cell, now - process.spawned))
        cell = self._cell_of[spec.name]
        ready = [member.state is ActorState.READY for member in cell.processes.values()]
        if cell.state is CellState.STARTING and len(ready) == len(cell.actors) and all(ready):
            cell.state = CellState.READY
            cell.book.ready(now)
            self._on_event(CellStarted(cell.name, cell.generation, now - cell.spawned))
            self._announce(cell, self._living())
            self._nudge()
