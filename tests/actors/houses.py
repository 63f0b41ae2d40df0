"""Wirings and a running supervisor for the tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from actors.events import SupervisorEvent
from actors.restarts import RestartPolicy
from actors.supervisor import Supervisor
from actors.wiring import ActorSpec, ChannelSpec, Wiring
from tests.helpers import wait_until_async

QUICK = RestartPolicy(limit=5, delay=0.0, longest=0.0, settled=0.0)
E_co = TypeVar("E_co")


def toy(name: str, kind: str, *, cell: str | None = None, config: bytes = b"", **more: object) -> ActorSpec:
    return ActorSpec(name, cell or f"{name}s", f"tests.actors.toys:{kind}", config, **more)  # type: ignore[arg-type]


def pair(caller: str = "Caller", echo: str = "Echo", *, config: bytes = b"", **more: object) -> Wiring:
    """A caller and an echo in two cells, joined by two rings."""
    return Wiring(
        actors=(toy("caller", caller, config=config), toy("echo", echo)),
        channels=(
            ChannelSpec("there", "caller", "echo", 65536, 16384),
            ChannelSpec("back", "echo", "caller", 65536, 16384),
        ),
        stage_timeout=15.0,
        **more,  # type: ignore[arg-type]
    )


class House:
    """A supervisor with everything it said."""

    def __init__(
        self, wiring: Wiring, *, policy: RestartPolicy = QUICK, loop: str = "auto", **more: object
    ) -> None:
        self.events: list[SupervisorEvent] = []
        self.also: Callable[[SupervisorEvent], None] = lambda event: None
        self.supervisor = Supervisor(
            wiring,
            on_event=self.on_event,
            answer=self.answer,
            policy=policy,
            loop_factory=loop,
            **more,  # type: ignore[arg-type]
        )

    def on_event(self, event: SupervisorEvent) -> None:
        self.events.append(event)
        self.also(event)

    async def answer(self, actor: str, kind: str, payload: bytes) -> bytes:
        if kind == "double":
            return str(2 * int(payload)).encode()
        raise LookupError(f"{actor} asked for {kind}")

    def of(self, kind: type[E_co]) -> list[E_co]:
        return [event for event in self.events if isinstance(event, kind)]

    def pid(self, actor: str) -> int:
        return self.supervisor.statistics().actors[actor].pid

    def report(self, actor: str, kind: str) -> str:
        return self.supervisor.reports(actor).get(kind, b"").decode()

    def echoed(self, actor: str = "caller") -> tuple[int, int]:
        """How many pings came back, and the pid that returned the last."""
        count, _, pid = self.report(actor, "echoed").partition(" ")
        return int(count or 0), int(pid or 0)


@contextlib.asynccontextmanager
async def running(house: House, *, grace: float = 5.0) -> AsyncIterator[House]:
    """Start, serve in the background, stop. What `serve` raised is raised at the end."""
    await house.supervisor.start()
    serving = asyncio.ensure_future(house.supervisor.serve())
    try:
        yield house
    finally:
        await house.supervisor.stop(grace)
    await serving


def alive(pid: int) -> Callable[[], bool]:
    def check() -> bool:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                stat = file.read()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat[stat.rindex(b")") + 2 :].split()[0] not in (b"Z", b"X")

    return check


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (proc(5), SigCgt)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


async def tell(house: House, actor: str) -> None:
    """Send SIGUSR1 once the actor handles it."""
    pid = house.pid(actor)
    await wait_until_async(lambda: handles(pid, signal.SIGUSR1), 10.0)
    os.kill(pid, signal.SIGUSR1)
