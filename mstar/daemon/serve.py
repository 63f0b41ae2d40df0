"""The daemon: binds, finds the model, starts the actors, watches over them, and stops them in order.

Exit codes: 0 after an orderly stop, 1 when the start failed or a cell was given up. The last line
written then is the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from actors.errors import ActorsError, CellGivenUp, StartFailed
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
from actors.supervisor import Supervisor
from actors.wiring import Wiring
from mstar import __version__
from mstar.config.launch import Failed, News, Progress, Ready
from mstar.config.load import ConfigError
from mstar.config.schema import Deployment
from mstar.daemon.compose import CELL, Address, CannotSplit, Meeting, WindowTooLong, compose
from mstar.daemon.log import log
from mstar.daemon.sockets import CannotListen, InUse, Sockets
from mstar.daemon.waiting import WaitingRoom
from mstar.model.errors import ModelError
from mstar.model.files import ModelFiles, resolve
from mstar.validation.placement import PlacementInvalid
from shm.errors import ShmError
from shm.segment import sweep

__all__ = ["Daemon", "loop_factory"]

# What a gateway may take beyond the drain time to end the open streams with an error event, in seconds.
STOP_MARGIN = 5.0
# What is left to the actors once a stop was hastened, in seconds.
HASTE = 5.0
# What is left, phase by phase, to actors that serve nobody yet; an import hears no order until it is over.
UNBORN = 1.0
_NAMED = re.compile(r"(?<=: )(?:mstar|shm)(?:\.\w+)+: ")
_SALT_BYTES = 32
_REFUSALS = (
    InUse,
    CannotListen,
    ModelError,
    WindowTooLong,
    CannotSplit,
    PlacementInvalid,
    ConfigError,
    ShmError,
    ActorsError,
)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Stopped(Exception):
    """A stop was asked for before the daemon was ready."""


class Daemon:
    """One server. ``run`` returns its exit code.

    ``news`` hears of the start's progress and end. ``parent`` is a process whose end ends the
    daemon at once. ``composer`` makes the wiring (see mstar.daemon.compose).
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        news: Callable[[News], None] = lambda news: None,
        parent: int | None = None,
        composer: Callable[..., Wiring] = compose,
    ) -> None:
        self._deployment = deployment
        self._news = news
        self._parent = parent
        self._compose = composer
        self._supervisor: Supervisor | None = None
        self._state = "starting"
        self._stage = "binding"
        self._began = time.monotonic()
        self._created = int(time.time())
        self._orders = 0
        self._stages: list[dict[str, Any]] = []
        self._identity: dict[str, Any] = {}

    def run(self) -> int:
        """Serve until a signal says otherwise. Must be called in the main thread."""
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(self._main())

    async def _main(self) -> int:
        self._stop = asyncio.Event()
        self._hurry: asyncio.Task[None] | None = None
        try:
            with self._ordered():
                return await self._serve()
        except _Stopped:
            return self._failed("stopped before it was ready", code=0)
        except StartFailed as error:
            if self._stop.is_set():
                return self._failed("stopped before it was ready", code=0)
            return self._failed(f"the start failed: {error.cause}", error.traceback)
        except CellGivenUp as error:
            return self._failed(str(error).rpartition("\n")[2], error.traceback)
        except _REFUSALS as error:
            return self._failed(" ".join(str(error).split()))

    async def _serve(self) -> int:
        deployment = self._deployment
        with contextlib.ExitStack() as stack:
            with self._timed("binding"):
                sweep()
                sockets = stack.enter_context(Sockets(deployment.listen, os.environ))
            self._identity = {"socket": str(sockets.path), "url": sockets.url}
            listeners = [sockets.uds] if sockets.tcp is None else [sockets.uds, sockets.tcp]
            async with WaitingRoom(listeners, lambda: self._stage):
                with self._timed("finding the model"):
                    files = await self._found()
            self._rendezvous = os.memfd_create("mstar rendezvous")
            stack.callback(os.close, self._rendezvous)
            self._identity["model"] = (deployment.served_model_name or (files.name,))[0]
            wiring = self._compose(
                deployment,
                files,
                Address(
                    None if sockets.tcp is None else sockets.tcp.fileno(),
                    sockets.uds.fileno(),
                    str(sockets.path),
                    sockets.port,
                ),
                daemon_pid=os.getpid(),
                created=self._created,
                meeting=Meeting(secrets.token_bytes(_SALT_BYTES), self._rendezvous),
            )
            self._supervisor = Supervisor(wiring, on_event=self._on_event, answer=self._answer)
            await self._start(self._supervisor)
            await self._watch(self._supervisor)
        log(logging.INFO, "stopped", seconds=time.monotonic() - self._began)
        return 0

    # Starting

    async def _found(self) -> ModelFiles:
        """Find the model in a thread that a stop order does not wait for."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[ModelFiles] = loop.create_future()

        def settle(error: BaseException | None, files: ModelFiles | None) -> None:
            if found.done():
                return
            if error is not None:
                found.set_exception(error)
            elif files is not None:
                found.set_result(files)

        def work() -> None:
            files, error = None, None
            try:
                files = self._find()
            except BaseException as caught:  # noqa: BLE001 - whatever it is, it is raised where it is awaited
                error = caught
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                loop.call_soon_threadsafe(settle, error, files)

        threading.Thread(target=work, name="finding the model", daemon=True).start()
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((found, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            stopping.cancel()
            return await found
        # A moment for a download to be ended by its thread.
        await asyncio.wait((found,), timeout=HASTE)
        if found.done():
            found.exception()
        raise _Stopped

    def _find(self) -> ModelFiles:
        def progress(stage: str, done: int, total: int) -> None:
            if self._stop.is_set():
                raise _Stopped
            self._stage = f"{stage} {done * 100 // total} %" if total else stage
            self._news(Progress("daemon", stage, done, total))

        return resolve(self._deployment.model, progress=progress)

    async def _start(self, supervisor: Supervisor) -> None:
        starting = asyncio.ensure_future(supervisor.start())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                await supervisor.stop(UNBORN)
            await starting
        finally:
            stopping.cancel()
        seconds = time.monotonic() - self._began
        self._state = "ready"
        socket, url, model = (self._identity[key] for key in ("socket", "url", "model"))
        log(logging.INFO, "ready", model=model, url=url or "none", socket=socket, seconds=seconds)
        self._news(Ready(os.getpid(), socket, url, model, seconds))

    async def _watch(self, supervisor: Supervisor) -> None:
        serving = asyncio.ensure_future(supervisor.serve())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            self._state = "stopping"
            given_up = serving.done() and serving.exception() is not None
            grace = HASTE if given_up or self._orders > 1 else self._deployment.drain_seconds + STOP_MARGIN
            # The gateway drains; the ranks behind it have nothing left to do.
            await supervisor.stop(grace, later=STOP_MARGIN)
            await serving
        finally:
            stopping.cancel()
            if self._hurry is not None:
                await self._hurry

    # Stopping

    @contextlib.contextmanager
    def _ordered(self) -> Iterator[None]:
        """Take stop orders from signals, and from the end of the parent."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, partial(self._on_signal, number))
        watch = None
        if self._parent is not None:
            try:
                watch = os.pidfd_open(self._parent)
            except ProcessLookupError:
                self._order("the parent process has ended", hasten=True)
            else:
                loop.add_reader(watch, self._on_parent_end, watch)
        try:
            yield
        finally:
            if watch is not None:
                loop.remove_reader(watch)
                os.close(watch)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._orders:
            # One more kills this process at once, and its children with it.
            for each in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)
        self._order(name, hasten=bool(self._orders))

    def _on_parent_end(self, watch: int) -> None:
        asyncio.get_running_loop().remove_reader(watch)
        self._order("the parent process has ended", hasten=True)

    def _order(self, why: str, *, hasten: bool) -> None:
        self._orders += 2 if hasten else 1
        drain = self._deployment.drain_seconds
        log(logging.INFO, "stopping now" if hasten else f"draining for at most {drain:g} s", why=why)
        if self._stop.is_set() and hasten and self._supervisor is not None and self._hurry is None:
            self._hurry = asyncio.ensure_future(self._supervisor.stop(HASTE))
        self._state = "stopping"
        self._stop.set()

    def _failed(self, cause: str, traceback: str = "", code: int = 1) -> int:
        # An error of ours is a sentence that needs no traceback; anything else is a fault to be found.
        if traceback and (not _NAMED.search(cause) or self._deployment.log_level == "debug"):
            print(traceback.rstrip(), file=sys.stderr)
        cause = _NAMED.sub("", cause)
        log(logging.ERROR if code else logging.INFO, cause)
        self._news(Failed(cause))
        return code

    # Telling

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """A stage of the daemon's own, told when it begins and logged when it ends."""
        self._stage = stage
        self._news(Progress("daemon", stage))
        began = time.monotonic()
        yield
        self._ended("daemon", stage, time.monotonic() - began)

    def _ended(self, actor: str, stage: str, seconds: float) -> None:
        log(logging.INFO, stage, actor=actor, seconds=seconds)
        if self._state == "starting":
            self._stages.append({"actor": actor, "stage": stage, "seconds": seconds})

    def _on_event(self, event: SupervisorEvent) -> None:
        match event:
            case StageReport(actor=actor, stage=stage, done=done, total=total):
                self._stage = f"{actor} {stage}"
                self._news(Progress(actor, stage, done, total))
            case StageEnded(actor=actor, stage=stage, seconds=seconds):
                self._ended(actor, stage, seconds)
            case ActorSpawned(actor=actor, pid=pid, generation=generation):
                log(logging.DEBUG, "spawned", actor=actor, pid=pid, generation=generation)
            case ActorReady(actor=actor, seconds=seconds):
                log(logging.INFO, "ready", actor=actor, seconds=seconds)
            case CellStarted(cell=cell, generation=generation, seconds=seconds):
                if generation > 1:
                    log(logging.INFO, "serves again", actor=cell, generation=generation, seconds=seconds)
            case CellDied(actor=actor, reason=reason):
                log(logging.ERROR, reason, actor=actor)
            case ActorEnded(actor=actor, pid=pid, cause=cause):
                log(logging.DEBUG, "ended", actor=actor, pid=pid, cause=cause)
            case CellRestarting(cell=cell, attempt=attempt, delay=delay, cause=cause):
                if cell == CELL:
                    os.ftruncate(
                        self._rendezvous, 0
                    )  # a word that was cut off by a kill could not be read over
                log(logging.WARNING, f"restarting: {cause}", actor=cell, attempt=attempt, delay=delay)

    async def _answer(self, actor: str, kind: str, payload: bytes) -> bytes:
        """Questions of actors. "status": this daemon's figures as a JSON object."""
        if kind != "status":
            raise ValueError(f"{actor} asked {kind!r}; the daemon answers 'status'")
        return msgspec.json.encode(self.statistics())

    def statistics(self) -> dict[str, Any]:
        """What `mstar status` shows of the daemon itself; times in seconds."""
        found: dict[str, Any] = {
            "version": __version__,
            "pid": os.getpid(),
            "state": self._state,
            "stage": self._stage if self._state == "starting" else "",
            "uptime_seconds": time.monotonic() - self._began,
            **self._identity,
            "stages": self._stages,
            "actors": [],
        }
        if self._supervisor is not None:
            figures = self._supervisor.statistics()
            found["actors"] = [entry._asdict() for entry in figures.actors.values()]
            found["cells"] = figures.cells
            found["shared_memory"] = figures.fabric._asdict()
        return found


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Loops of uvloop where it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
