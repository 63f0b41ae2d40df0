"""The transports, all with one face: send bytes, receive bytes, release what was received."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from shm.board import Board, Line
from shm.doorbell import Doorbell
from shm.ring import Ring, RingReader, RingWriter
from shm.segment import Segment
from shm.steps import StepLayout, StepReader, StepRing, StepWriter
from shm.wait import Bell, Sleeper

__all__ = ["LAYOUT", "Channel", "Endpoint", "RingChannel", "ZmqChannel", "open_channel"]

LAYOUT = StepLayout(max_rows=1024, max_grants=1024, tail_bytes=4096, slots=8, readers=1)
_OUT_BYTES, _BACK_BYTES = 1 << 23, 1 << 20
_PULSE = 0.1
_LENGTH = struct.Struct("<I")
_STREAM_LIMIT = 1 << 22


class Endpoint(msgspec.Struct, frozen=True):
    """What the peer process needs: transport, task, spin, socket path, inherited descriptors, its core."""

    kind: str
    task: str
    spin_ns: int
    path: str
    fds: tuple[int, ...]
    core: int | None
    loop: str


class Channel(Protocol):
    """Both directions of one transport."""

    async def send(self, payload: bytes | bytearray) -> None: ...
    async def recv(self) -> bytes | memoryview: ...
    def release(self) -> None: ...
    def close(self) -> None: ...


class Waiter:
    """Poll, spin, announce, sleep on the doorbell: one reader callback, one safety timer."""

    def __init__(self, line: Line, doorbell: Doorbell, spin_ns: int) -> None:
        self.sleeper = Sleeper(line)
        self._doorbell = doorbell
        self._spin_ns = spin_ns
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._loop.add_reader(doorbell.fd, self._on_bell)
        self._timer = self._loop.call_later(_PULSE, self._pulse)

    async def wait(self, has_work: Callable[[], bool]) -> None:
        if self._sleeper_spins(has_work) or not self.sleeper.announce(has_work):
            return
        self._future = self._loop.create_future()
        await self._future
        self._future = None
        self.sleeper.awake()

    def _sleeper_spins(self, has_work: Callable[[], bool]) -> bool:
        return self.sleeper.spin(has_work, self._spin_ns, time.perf_counter_ns)

    def _on_bell(self) -> None:
        self._doorbell.drain()
        self._wake()

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def _pulse(self) -> None:
        self._timer = self._loop.call_later(_PULSE, self._pulse)
        self._wake()

    def close(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._doorbell.fd)


class RingChannel:
    """Two byte rings and a step ring; `me` is 0 for the leader, 1 for the peer."""

    def __init__(
        self, board: Board, bells: list[Doorbell], rings: list[Ring], steps: StepRing, me: int, spin_ns: int
    ):
        self.steps = steps
        self._parts: list[Segment | Doorbell] = [
            board.segment,
            bells[0],
            bells[1],
            rings[0].segment,
            rings[1].segment,
            steps.segment,
        ]
        lines = [board.line(i) for i in range(2)]
        bell = Bell(lines[1 - me], bells[1 - me])
        self.writer = RingWriter(rings[me], bell)
        self.reader = RingReader(rings[1 - me])
        self.waiter = Waiter(lines[me], bells[me], spin_ns)
        self.bell = bell

    @classmethod
    def create(cls, spin_ns: int) -> tuple[RingChannel, tuple[int, ...]]:
        board, bells = Board.create(2), [Doorbell.create() for _ in range(2)]
        rings = [Ring.create(_OUT_BYTES), Ring.create(_BACK_BYTES)]
        channel = cls(board, bells, rings, StepRing.create(LAYOUT), 0, spin_ns)
        return channel, tuple(part.fd for part in channel._parts)

    @classmethod
    def attach(cls, fds: tuple[int, ...], spin_ns: int) -> RingChannel:
        bells = [Doorbell.attach(fd) for fd in fds[1:3]]
        rings = [Ring.attach(fd) for fd in fds[3:5]]
        return cls(Board.attach(fds[0]), bells, rings, StepRing.attach(fds[5], LAYOUT), 1, spin_ns)

    def step_writer(self) -> StepWriter:
        return StepWriter(self.steps, [self.bell])

    def step_reader(self) -> StepReader:
        return StepReader(self.steps, 0)

    async def send(self, payload: bytes | bytearray) -> None:
        if not self.writer.send(payload):
            raise RuntimeError("the ring is full with one message in flight")

    async def recv(self) -> memoryview:
        while (record := self.reader.peek()) is None:
            await self.waiter.wait(self.reader.has_data)
        return record

    def release(self) -> None:
        self.reader.release()

    def close(self) -> None:
        self.waiter.close()
        for part in self._parts:
            part.close()


class StreamChannel:
    """asyncio streams over a Unix socket, messages prefixed with their length."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def listen(cls, path: str, started: Callable[[], None]) -> StreamChannel:
        accepted: asyncio.Future[StreamChannel] = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(cls(reader, writer))

        server = await asyncio.start_unix_server(accept, path, limit=_STREAM_LIMIT)
        started()
        channel = await accepted
        server.close()
        return channel

    @classmethod
    async def connect(cls, path: str) -> StreamChannel:
        return cls(*await asyncio.open_unix_connection(path, limit=_STREAM_LIMIT))

    async def send(self, payload: bytes | bytearray) -> None:
        self._writer.write(_LENGTH.pack(len(payload)))
        self._writer.write(payload)
        await self._writer.drain()

    async def recv(self) -> bytes:
        (length,) = _LENGTH.unpack(await self._reader.readexactly(4))
        return await self._reader.readexactly(length)

    def release(self) -> None:
        pass

    def close(self) -> None:
        self._writer.close()


class ZmqChannel:
    """PUSH one way, PULL the other, over ipc; the leader binds."""

    def __init__(self, path: str, *, bind: bool) -> None:
        self._context = zmq.asyncio.Context()
        self._push, self._pull = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, name, bound in (
            (self._push, "a" if bind else "b", bind),
            (self._pull, "b" if bind else "a", bind),
        ):
            socket.setsockopt(zmq.LINGER, 1000)
            (socket.bind if bound else socket.connect)(f"ipc://{path}-{name}")

    async def send(self, payload: bytes | bytearray) -> None:
        await self._push.send(payload)

    async def recv(self) -> bytes:
        received: bytes = await self._pull.recv()
        return received

    def release(self) -> None:
        pass

    def close(self) -> None:
        self._push.close()
        self._pull.close()
        self._context.term()


async def open_channel(endpoint: Endpoint) -> Channel:
    """The peer's end. The core is taken afterwards, so that zmq's own threads stay free to run anywhere."""
    channel: Channel
    if endpoint.kind == "ring":
        channel = RingChannel.attach(endpoint.fds, endpoint.spin_ns)
    elif endpoint.kind == "uds":
        channel = await StreamChannel.connect(endpoint.path)
    else:
        channel = ZmqChannel(endpoint.path, bind=False)
    if endpoint.core is not None:
        os.sched_setaffinity(0, {endpoint.core})
    return channel
