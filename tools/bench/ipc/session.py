"""One transport, one task, one peer process: start it, measure every size, end it."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from tools.bench.ipc.channels import Channel, Endpoint, RingChannel, StreamChannel, ZmqChannel
from tools.bench.ipc.runqueue import RunQueue
from tools.bench.ipc.tasks import Publisher, Sample, step_publisher, stop, time_messages, time_steps

__all__ = ["TRANSPORTS", "Plan", "session"]

TRANSPORTS = ("ring hot", "ring bell", "uds", "zmq")

_ROOT = Path(__file__).parents[3]
_HOT_NS = 2_000_000
_WARM_UP = 200
_SLOW_BYTES = 1 << 20
_SLOW_FACTOR = 4  # so many fewer samples of the largest messages


class Plan(NamedTuple):
    """Transports, message sizes in bytes, rows of steps, samples a round, event loop, a core per process."""

    transports: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: tuple[int, ...]
    samples: int
    loop: str
    pin: bool


async def session(plan: Plan, transport: str, task: str) -> dict[int, list[Sample]]:
    """Samples by size (bytes or rows) of one task, "messages" or "steps"."""
    kind, spin_ns = transport.split(" ")[0], _HOT_NS if transport == "ring hot" else 0
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="mstar-ipc-") as folder:
        path = f"{folder}/s"
        peers: list[subprocess.Popen[str]] = []

        def spawn(fds: tuple[int, ...] = ()) -> None:
            endpoint = Endpoint(kind, task, spin_ns, path, fds, cores[-1] if plan.pin else None, plan.loop)
            command = [sys.executable, "-m", "tools.bench.ipc.peer", msgspec.json.encode(endpoint).decode()]
            peers.append(
                subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
            )

        channel: Channel
        if kind == "ring":
            channel, fds = RingChannel.create(spin_ns)
            spawn(fds)
        elif kind == "uds":
            channel = await StreamChannel.listen(path, spawn)
        else:
            channel = ZmqChannel(path, bind=True)
            spawn()
        peer = peers[0]
        try:
            if plan.pin:
                os.sched_setaffinity(0, cores[:1])
            output = peer.stdout
            if output is None or await asyncio.to_thread(output.readline) != "ready\n":
                raise RuntimeError(f"the peer of {transport!r} did not start")
            publish = step_publisher(channel) if task == "steps" else None
            result = await _measure(plan, task, channel, publish, peer.pid)
            await stop(channel, publish)
            await asyncio.to_thread(peer.wait, 10)
        finally:
            os.sched_setaffinity(0, cores)
            peer.kill()
            peer.wait()
            if peer.stdout is not None:
                peer.stdout.close()
            channel.close()
    return result


async def _measure(
    plan: Plan, task: str, channel: Channel, publish: Publisher | None, pid: int
) -> dict[int, list[Sample]]:
    queue = RunQueue([os.getpid(), pid])

    async def measure(size: int, count: int) -> list[Sample]:
        if task == "steps":
            return await time_steps(channel, size, count, queue, publish)
        return await time_messages(channel, size, count, queue)

    result = {}
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for size in plan.rows if task == "steps" else plan.sizes:
            slow = task == "messages" and size >= _SLOW_BYTES
            count = plan.samples // _SLOW_FACTOR if slow else plan.samples
            await measure(size, min(_WARM_UP, count))
            result[size] = await measure(size, count)
    finally:
        gc.enable()
        gc.unfreeze()
        queue.close()
    return result
