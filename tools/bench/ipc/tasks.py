"""What is sent: a message and a short reply; a step and its tokens. Both ends of both."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shm.codec import Table
from tools.bench.ipc.channels import LAYOUT, Channel, RingChannel
from tools.bench.ipc.runqueue import RunQueue

__all__ = [
    "Publisher",
    "Sample",
    "answer_messages",
    "answer_steps",
    "step_publisher",
    "stop",
    "time_messages",
    "time_steps",
]


class Sample(NamedTuple):
    """Nanoseconds: round trip, one way (0: not measured), what threads of both waited for a core."""

    round_trip: int
    one_way: int
    queued: int


Publisher = Callable[[NDArray[np.int64], NDArray[np.int32]], None]

_REPLY_BYTES = 200
_COLUMNS = ("slot", "walk", "source", "counter", "samples", "late", "start", "end", "total", "stride")
STEP = Table("step", {"request": "int64", **dict.fromkeys(_COLUMNS, "int32")})
TOKENS = Table("tokens", {"slot": "int32", "token": "int32"})


async def time_messages(channel: Channel, size: int, count: int, queue: RunQueue) -> list[Sample]:
    """Round trips of `size` bytes out and 200 B back; the peer reports when the message had arrived."""
    payload = bytearray(size)
    now = time.perf_counter_ns
    samples = []
    for _ in range(count):
        queue.delay()
        start = now()
        payload[:8] = start.to_bytes(8, "little")
        await channel.send(payload)
        reply = await channel.recv()
        end = now()
        one_way = int.from_bytes(reply[:8], "little")
        channel.release()
        samples.append(Sample(end - start, one_way, queue.delay()))
    return samples


async def answer_messages(channel: Channel) -> None:
    """Until a message comes that is too short to be one."""
    pad = bytes(_REPLY_BYTES - 8)
    now = time.perf_counter_ns
    while True:
        message = await channel.recv()
        arrived = now()
        sent = int.from_bytes(message[:8], "little")
        last = len(message) < 8
        channel.release()
        if last:
            return
        await channel.send((arrived - sent).to_bytes(8, "little") + pad)


async def stop(channel: Channel, publish: Publisher | None) -> None:
    """Tell the peer to end: by an empty step where steps are published, else by a short message."""
    if publish is None:
        await channel.send(b"end")
    else:
        publish(np.empty(0, np.int64), np.empty((len(_COLUMNS), 0), np.int32))


def step_publisher(channel: Channel) -> Publisher | None:
    """What writes a step into a step ring; None where the transport has only messages."""
    if not isinstance(channel, RingChannel):
        return None
    writer = channel.step_writer()
    numbers = itertools.count(1)

    def publish(request: NDArray[np.int64], matrix: NDArray[np.int32]) -> None:
        rows = len(request)
        seq = next(numbers)
        slot = writer.begin(seq)
        slot.header[1] = rows
        slot.request[:rows] = request
        slot.rows[:, :rows] = matrix
        writer.commit(seq)

    return publish


async def time_steps(
    channel: Channel, rows: int, count: int, queue: RunQueue, publish: Publisher | None
) -> list[Sample]:
    """Round trips from the scheduler's columns to the tokens as a list, codecs on both ends included."""
    rng = np.random.default_rng(rows)
    request = rng.integers(0, 1 << 60, rows)
    matrix = rng.integers(0, 1 << 15, (len(_COLUMNS), rows)).astype(np.int32)
    now = time.perf_counter_ns
    samples = []
    for _ in range(count):
        queue.delay()
        start = now()
        if publish is None:
            columns: dict[str, NDArray[Any]] = dict(zip(_COLUMNS, matrix, strict=False))
            columns["request"] = request
            await channel.send(STEP.encode(columns))
        else:
            publish(request, matrix)
        tokens = TOKENS.decode(await channel.recv())["token"].tolist()
        channel.release()
        end = now()
        if len(tokens) != rows or tokens[-1] != rows - 1:
            raise RuntimeError(f"a step of {rows} rows came back as {len(tokens)} tokens")
        samples.append(Sample(end - start, 0, queue.delay()))
    return samples


async def answer_steps(channel: Channel) -> None:
    """A token for every row, until an empty step or a short message comes."""
    tokens = np.arange(LAYOUT.max_rows, dtype=np.int32)
    if isinstance(channel, RingChannel):
        await _answer_ring_steps(channel, tokens)
        return
    while True:
        frame = await channel.recv()
        if len(frame) < 8:
            return
        columns = STEP.decode(frame)
        rows = len(columns["request"])
        await channel.send(TOKENS.encode({"slot": columns["slot"], "token": tokens[:rows]}))


async def _answer_ring_steps(channel: RingChannel, tokens: NDArray[np.int32]) -> None:
    reader = channel.step_reader()
    while True:
        slot = reader.peek()
        if slot is None:
            await channel.waiter.wait(reader.has_data)
            continue
        rows = slot.header[1]
        if not rows:
            return
        request = slot.request[:rows]
        columns = slot.rows[:, :rows]
        frame = TOKENS.encode({"slot": columns[0], "token": tokens[: len(request)]})
        await channel.send(frame)
        reader.done()
