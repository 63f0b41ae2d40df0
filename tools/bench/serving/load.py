"""Sends a workload's jobs: closed loop, open loop, or streams that a burst runs into."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from tools.bench.serving.client import Client
from tools.bench.serving.exchange import Exchange
from tools.bench.serving.workload import Job, Workload

__all__ = ["run", "run_burst", "run_closed", "run_open"]

Clock = Callable[[], float]


async def run(
    client: Client, workload: Workload, jobs: Sequence[Job], burst: Sequence[Job], clock: Clock
) -> list[Exchange]:
    """All exchanges of ``workload``, in no order."""
    if burst:
        return await run_burst(client, jobs, burst, clock)
    if workload.concurrency:
        return await run_closed(client, jobs, workload.concurrency, clock)
    return await run_open(client, jobs, clock, asyncio.sleep)


async def run_closed(client: Client, jobs: Sequence[Job], concurrency: int, clock: Clock) -> list[Exchange]:
    """Keep ``concurrency`` jobs in flight; each one that ends is replaced at once."""
    waiting = iter(jobs)

    async def worker() -> list[Exchange]:
        return [await client.send(job, clock()) for job in waiting]

    done = await asyncio.gather(*(worker() for _ in range(min(concurrency, len(jobs)))))
    return [exchange for exchanges in done for exchange in exchanges]


async def run_open(
    client: Client, jobs: Sequence[Job], clock: Clock, sleep: Callable[[float], Awaitable[None]]
) -> list[Exchange]:
    """Send each job at its arrival, whatever became of the ones before."""
    begun = clock()
    sent: list[asyncio.Task[Exchange]] = []
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            due = begun + job.arrival
            await sleep(max(due - clock(), 0.0))
            sent.append(group.create_task(client.send(job, due)))
    return [task.result() for task in sent]


async def run_burst(
    client: Client, jobs: Sequence[Job], burst: Sequence[Job], clock: Clock
) -> list[Exchange]:
    """Start ``jobs``; when every one of them has shown text or ended, send ``burst`` at once."""
    begun = [asyncio.Event() for _ in jobs]

    async def decode(job: Job, shown: asyncio.Event) -> Exchange:
        try:
            return await client.send(job, clock(), shown.set)
        finally:
            shown.set()

    streams = [asyncio.create_task(decode(job, shown)) for job, shown in zip(jobs, begun, strict=True)]
    for shown in begun:
        await shown.wait()
    sent = clock()
    answers = await asyncio.gather(*(client.send(job, sent) for job in burst))
    return [*(await asyncio.gather(*streams)), *answers]
