"""Toy actors for the tests of the runtime; importable by the processes that the tests start."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import msgspec

from actors.actor import Actor, PeerEvent, PeerLost, PeerReady
from actors.context import Context
from actors.errors import AskFailed


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
        while time.monotonic() < float("inf"):
            pass
