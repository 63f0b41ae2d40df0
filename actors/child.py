"""The entry of an actor's process: `python -P -m actors.child CONTROL_FD PARENT_PID`.

It ties its life to the daemon's, learns from the control socket's first frame what it is, and runs the
actor's lifecycle. Whatever goes wrong is told to the supervisor as a traceback before the process ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from actors.actor import Actor
from actors.context import Context, LineStage
from actors.errors import ActorsError
from actors.frames import Boot, Failed, FromSupervisor
from actors.handover import ControlSocket
from actors.liveness import die_with_parent

__all__ = ["main"]

_BOOT_TIMEOUT = 10.0
_LAST_WORDS_TIMEOUT = 1.0
_TRACEBACK_LIMIT = 32 * 1024
_SWITCH_INTERVAL = (
    50e-6  # a Python thread in an actor holds up the loop five to ten times less than with 5 ms
)
SUPERVISOR_DECIDES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Life:
    """The lifecycle, and which part of it is running."""

    def __init__(self, boot: Boot, control: ControlSocket[FromSupervisor]) -> None:
        self._boot = boot
        self._control = control
        self.during = "import"

    async def live(self) -> None:
        ctx = Context(self._boot, self._control, asyncio.get_running_loop())
        ctx.line.pid = os.getpid()
        ctx.line.stage = LineStage.STARTING
        ctx.open()
        try:
            ctx.stage("importing")
            actor = _load(self._boot.target)(ctx)
            self.during = "setup"
            ctx.stage("setting up")
            if not await self._finished(ctx, actor.setup(), stops=True):
                return
            gc.collect()
            gc.freeze()
            ctx.ready()
            self.during = "run"
            ctx.deliver(actor.on_peer)
            await self._finished(ctx, actor.run(), stops=False)
            self.during = "teardown"
            await actor.teardown()
        finally:
            ctx.close()

    async def _finished(self, ctx: Context, work: Coroutine[Any, Any, None], *, stops: bool) -> bool:
        """Wait for a part of the lifecycle; a failure elsewhere in the actor, or (`stops`) a stop order,
        cancels it.
        """
        task = asyncio.ensure_future(work)
        others: list[asyncio.Future[None]] = [ctx.failed]
        if stops:
            others.append(asyncio.ensure_future(ctx.until_stopping()))
        try:
            await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
            if ctx.failed.done():
                ctx.failed.result()
            if not task.done():
                return False
            task.result()
            return True
        finally:
            for future in (task, *others[1:]):
                future.cancel()
            await asyncio.wait([task, *others[1:]], timeout=_LAST_WORDS_TIMEOUT)


def _load(target: str) -> type[Actor]:
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, Actor)):
        raise TypeError(f"target {target!r} is {found!r}; it must be a subclass of actors.actor.Actor")
    return found


def _loop_factory(kind: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """`kind` is "uvloop", "asyncio", or "auto": uvloop where it is installed."""
    if kind == "asyncio":
        return asyncio.SelectorEventLoop
    try:
        import uvloop
    except ImportError:
        if kind == "uvloop":
            raise
        return asyncio.SelectorEventLoop
    return uvloop.new_event_loop


def _summary(error: BaseException) -> str:
    """The last line of a traceback, without the lines that some messages go on with."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def main(arguments: list[str]) -> int:
    descriptor, parent = int(arguments[0]), int(arguments[1])
    die_with_parent(parent)
    # Blocked by the supervisor since before the fork, so that no Ctrl-C could come in between.
    for number in SUPERVISOR_DECIDES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISOR_DECIDES)
    faulthandler.enable()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    os.set_inheritable(descriptor, False)
    control: ControlSocket[FromSupervisor] = ControlSocket(socket.socket(fileno=descriptor), FromSupervisor)
    life: _Life | None = None
    try:
        boot = control.wait_readable(_BOOT_TIMEOUT)
        if not isinstance(boot, Boot):
            raise ActorsError(f"the first control frame is {type(boot).__name__}, expected Boot")
        sys.path[:] = boot.path
        for fd in boot.fds.values():
            os.set_inheritable(fd, False)
        life = _Life(boot, control)
        with asyncio.Runner(loop_factory=_loop_factory(boot.loop)) as runner:
            runner.run(life.live())
    except BaseException as error:  # noqa: BLE001 - the process ends; the supervisor must hear why, SystemExit included
        text = "".join(traceback.format_exception(error))
        during = "import" if life is None else life.during
        control.send_last(Failed(during, _summary(error), text[-_TRACEBACK_LIMIT:]), _LAST_WORDS_TIMEOUT)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
