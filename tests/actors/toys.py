"""Toy actors for the tests of the runtime; importable by the processes that the tests start."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time

import msgspec

from actors.actor import Actor, PeerEvent, PeerLost, PeerReady
from actors.context import Context
from actors.errors import AskFailed
from actors.liveness import Watch
from shm.errors import Poisoned
from shm.segment import Segment


class Ping(msgspec.Struct, frozen=True, array_like=True):
    number: int
    pid: int


class Echo(Actor):
    """Returns what comes in on "there" on "back"."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.encoder = msgspec.msgpack.Encoder()
        self.box = ctx.mailbox("there", msgspec.msgpack.Decoder(Ping), self.on_ping)

    def on_ping(self, ping: Ping) -> None:
        self.ctx.line.step = ping.number
        with contextlib.suppress(Poisoned):
            self.ctx.outbox["back"].send(self.encoder.encode(Ping(ping.number, os.getpid())))

    async def run(self) -> None:
        while not self.ctx.stopping:
            self.box.drain()
            await self.ctx.wait()


class Caller(Actor):
    """Sends numbers on "there" one at a time, from 1 whenever its peer is ready, and reports what returns."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.encoder = msgspec.msgpack.Encoder()
        self.box = ctx.mailbox("back", msgspec.msgpack.Decoder(Ping), self.on_ping)
        self.events: list[str] = []
        self.count = 0
        self.limit = int(ctx.config or b"1000000000")

    def send(self, number: int) -> None:
        with contextlib.suppress(Poisoned):  # the peer is dead, and its PeerLost is on the way
            self.ctx.outbox["there"].send(self.encoder.encode(Ping(number, os.getpid())))

    def on_ping(self, ping: Ping) -> None:
        self.count += 1
        self.ctx.line.step = self.count
        self.ctx.report("echoed", f"{self.count} {ping.pid}".encode())
        if ping.number < self.limit:
            self.send(ping.number + 1)

    def on_peer(self, event: PeerEvent) -> None:
        match event:
            case PeerLost(actor, cell, reason):
                self.events.append(f"lost {actor} of {cell}: {reason}")
            case PeerReady(actor, cell, generation):
                self.events.append(f"ready {actor} of {cell} in generation {generation}")
                self.send(1)
        self.ctx.report("events", "\n".join(self.events).encode())

    async def run(self) -> None:
        while not self.ctx.stopping:
            self.box.drain()
            await self.ctx.wait()


class ServedCaller(Caller):
    """The same in callback style."""

    async def run(self) -> None:
        self.ctx.serve(self.box.drain)
        await self.ctx.until_stopping()


class Staged(Actor):
    """Goes through named stages."""

    async def setup(self) -> None:
        for i in range(4):
            self.ctx.stage("loading", i, 3)
            await asyncio.sleep(0)
        self.ctx.stage("capturing")


class Stuck(Actor):
    """Stands still in a stage."""

    async def setup(self) -> None:
        self.ctx.stage("loading", 3, 12)
        await asyncio.Event().wait()


class Failing(Actor):
    """Raises where its config says."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        if ctx.config == b"init":
            raise ValueError("broken in __init__")

    async def setup(self) -> None:
        if self.ctx.config == b"setup":
            self.ctx.stage("loading", 3, 12)
            raise ValueError("broken in setup")
        if self.ctx.config == b"signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.ctx.config == b"exit":
            os._exit(3)


class Asking(Actor):
    """Asks the supervisor and reports the answers."""

    async def run(self) -> None:
        answer = await self.ctx.ask("double", b"21")
        try:
            await self.ctx.ask("refuse", b"")
        except AskFailed as error:
            answer += b" " + str(error).encode()
        self.ctx.report("answers", answer)
        await self.ctx.until_stopping()


class Stubborn(Actor):
    """Does not stop when told."""

    async def run(self) -> None:
        while True:
            await self.ctx.until_stopping()
            await asyncio.sleep(3600)


class Spinning(Actor):
    """Holds its loop in setup, so that it hears nothing."""

    async def setup(self) -> None:
        self.ctx.stage("holding the loop")
        while time.monotonic() < float("inf"):
            pass


class Front(Actor):
    """Greets whoever connects to its inherited socket."""

    async def setup(self) -> None:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            writer.close()

        listening = socket.socket(fileno=os.dup(self.ctx.fds["tcp"]))
        self.server = await asyncio.start_server(greet, sock=listening)

    async def teardown(self) -> None:
        self.server.close()
        await self.server.wait_closed()


class Settings(Actor):
    """Reports how its process is set up."""

    async def run(self) -> None:
        inherited = [fd for fd in range(256) if _open(fd) and os.get_inheritable(fd)]
        lines = {
            "TOY": os.environ["TOY"],
            "switch": f"{sys.getswitchinterval() * 1e6:.0f} us",
            "frozen": gc.get_freeze_count() > 0,
            "inherited": ",".join(map(str, inherited)),
        }
        self.ctx.report("settings", "\n".join(f"{k}={v}" for k, v in lines.items()).encode())
        await self.ctx.until_stopping()


def _open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


class Fragile(Actor):
    """Raises when it is told by SIGUSR1."""

    async def run(self) -> None:
        told = asyncio.Event()
        self.ctx.loop.add_signal_handler(signal.SIGUSR1, told.set)
        await told.wait()
        raise RuntimeError("a signal was too much")


class Brief(Actor):
    """Ends without an order, when it is sent SIGUSR1."""

    async def run(self) -> None:
        told = asyncio.Event()
        self.ctx.loop.add_signal_handler(signal.SIGUSR1, told.set)
        await told.wait()


class Sharing(Actor):
    """Reports peer events and which generation of everything it holds."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.events: list[str] = []
        self.poisoned: set[str] = set()
        self.report()

    def on_peer(self, event: PeerEvent) -> None:
        if isinstance(event, PeerLost):
            self.events.append(f"lost {event.actor} of {event.cell}: {event.reason}")
            self.poisoned |= {name for name, segment in self.segments().items() if segment.poisoned}
            self.ctx.report("poisoned at the loss", " ".join(sorted(self.poisoned)).encode())
        else:
            self.events.append(f"ready {event.actor} of {event.cell} in generation {event.generation}")
        self.report()

    def segments(self) -> dict[str, Segment]:
        ctx = self.ctx
        found = {name: reader.ring.segment for name, reader in ctx.inbox.items()}
        found |= {name: writer.ring.segment for name, writer in ctx.outbox.items()}
        found |= {name: slab.pool.segment for name, slab in ctx.slabs.items()}
        found |= {name: steps.ring.segment for name, steps in ctx.steps.items()}
        order = ("in", "out", "aside", "prompts", "steps")
        return {name: found[name] for name in sorted(found, key=order.index)}

    def report(self) -> None:
        self.ctx.report("events", "\n".join(self.events).encode())
        generations = (f"{name}={segment.generation}" for name, segment in self.segments().items())
        self.ctx.report("generations", " ".join(generations).encode())


class Burst(Actor):
    """When told by SIGUSR1, writes a hundred messages to a sleeping reader without ringing, and dies."""

    async def setup(self) -> None:
        self.ctx.loop.add_signal_handler(signal.SIGUSR1, self.burst)

    def burst(self) -> None:
        writer = self.ctx.outbox["back"]
        writer._notify = None
        for _ in range(100):
            writer.send(b"message")
        os.kill(os.getpid(), signal.SIGKILL)


class Collector(Actor):
    """Reads nothing before its peer is lost."""

    def on_peer(self, event: PeerEvent) -> None:
        if isinstance(event, PeerLost):
            reader, count = self.ctx.inbox["back"], 0
            while reader.peek() is not None:
                reader.release()
                count += 1
            self.ctx.report("collected", f"{count} messages after the loss".encode())


class Mourner(Actor):
    """Raises as soon as its mate is dead, before anybody else can have seen it."""

    def on_peer(self, event: PeerEvent) -> None:
        if isinstance(event, PeerReady):
            self.watch = Watch(self.ctx.lines[event.actor].pid)
            self.ctx.report("watching", b"yes")
            self.ctx.loop.call_soon(self.look)

    def look(self) -> None:
        if self.watch.look().exiting:
            raise SystemExit("the mate is dead")
        self.ctx.loop.call_soon(self.look)


class Late(Caller):
    """A caller whose setup ends when it is sent SIGUSR1."""

    async def setup(self) -> None:
        told = asyncio.Event()
        self.ctx.loop.add_signal_handler(signal.SIGUSR1, told.set)
        await told.wait()
