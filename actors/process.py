"""One actor's process as its supervisor holds it: the child, its control socket, its stages and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from actors.child import SUPERVISOR_DECIDES
from actors.frames import Boot, Failed, FromActor, Stage
from actors.handover import ControlSocket, control_pair
from actors.liveness import Watch, signal_name
from actors.wiring import ActorSpec

__all__ = ["ActorProcess", "ActorState", "search_path"]

_ROOT = str(Path(__file__).resolve().parents[1])


class ActorState(StrEnum):
    """`waiting` is an actor without a process: before its start, between restarts, after its end."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DYING = "dying"


class ActorProcess:
    """A spawned child. Times are seconds of the supervisor's clock."""

    def __init__(self, spec: ActorSpec, boot: Boot, pass_fds: Sequence[int], now: float) -> None:
        """Spawn from the calling thread, with whose end the child dies. Raises OSError."""
        self.spec = spec
        self.generation = boot.generation
        self.state = ActorState.STARTING
        self.spawned = now
        self.stage = "starting"
        self.stage_since = now
        self.progress = now
        self.failure: Failed | None = None
        self.verdict = ""
        self.reports: dict[str, bytes] = {}
        self.mute_since: float | None = None
        self._counted: tuple[str, int, int] | None = None
        self._signal = 0
        ours, theirs = control_pair()
        self.control: ControlSocket[FromActor] = ControlSocket(ours, FromActor)
        try:
            self.control.send(boot)  # waits in the kernel until the child reads it
            self._child = _spawn(spec, theirs.fileno(), pass_fds)
        except BaseException:
            self.control.close()
            raise
        finally:
            theirs.close()
        self.pid = self._child.pid
        self._watch = Watch(self.pid)

    @property
    def label(self) -> str:
        """The stage with its count, as people read it: loading 3/12."""
        if self._counted is not None and self._counted[2]:
            return f"{self.stage} {self._counted[1]}/{self._counted[2]}"
        return self.stage

    def advance(self, frame: Stage, now: float) -> float | None:
        """Note a stage report; the seconds the previous stage took if this is another stage, else None.

        Only a change counts as progress: a stage that repeats itself is as stuck as a silent one.
        """
        if (counted := (frame.name, frame.done, frame.total)) != self._counted:
            self._counted = counted
            self.progress = now
        if frame.name == self.stage:
            return None
        took = now - self.stage_since
        self.stage = frame.name
        self.stage_since = now
        return took

    def dying(self) -> bool:
        """Look whether the kernel has begun to end it."""
        signs = self._watch.look()
        self._signal = self._signal or signs.signal
        return signs.exiting

    @property
    def signalled(self) -> bool:
        """Whether a signal is known to end it."""
        return self._signal != 0

    def kill(self) -> None:
        """SIGKILL. A child that is not reaped yet keeps its pid, so nobody else can be hit."""
        if self._child.returncode is None:
            self._child.send_signal(signal.SIGKILL)

    def reaped(self) -> bool:
        """Reap it if it has ended; True once it is gone."""
        return self._child.poll() is not None

    def close(self) -> None:
        """Let go of a reaped child."""
        self.control.close()
        self._watch.close()

    def cause(self) -> str:
        """What ended it, a sentence: the exception it sent, the supervisor's verdict, the signal, or the exit
        code.
        """
        where = f'actor {self.spec.name} (pid {self.pid}) in stage "{self.label}"'
        if self.failure is not None:
            return f"{where} failed during {self.failure.during}: {self.failure.error}"
        if self.verdict:
            return f"{where} {self.verdict}"
        code = self._child.returncode
        number = -code if code is not None and code < 0 else self._signal
        if number:
            return f"{where} was killed by {signal_name(number)}"
        if code:
            return f"{where} exited with code {code}"
        if code == 0:
            return f"{where} ended by itself: its run() returned though it was not told to stop"
        return f"{where} is exiting"


def _spawn(spec: ActorSpec, control: int, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **spec.env}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, environment.get("PYTHONPATH"))))
    # Ctrl-C reaches the whole process group, a fresh interpreter included: blocked here, and ignored by the
    # child before it unblocks them, these signals can never end an actor.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISOR_DECIDES)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "actors.child", str(control), str(os.getpid())],
            pass_fds=sorted({control, *pass_fds}),
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def search_path() -> tuple[str, ...]:
    """This process's module search path, for a child that starts elsewhere."""
    return tuple(os.path.abspath(entry) for entry in sys.path)
