"""A few threads for work that must not run on the loop, with a bound on what waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from mstar.gateway.errors import overloaded

__all__ = ["PoolStatistics", "WorkPool"]

T = TypeVar("T")


class PoolStatistics(NamedTuple):
    """Jobs that run or wait now, and counts since the start."""

    pending: int
    limit: int
    finished: int
    refused: int


class WorkPool:
    """Runs parsing, templates and tokenizing. Beyond ``limit`` jobs, running or waiting, it refuses."""

    def __init__(self, threads: int, limit: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="gateway-work")
        self._limit = limit
        self._pending = self._finished = self._refused = 0

    async def run(self, work: Callable[..., T], *args: Any, bounded: bool = True, **kwargs: Any) -> T:
        """Run ``work`` on a thread. Raises ApiError 429 beyond the limit, and whatever ``work`` raises.

        ``bounded`` False is for work that its caller bounds, one piece a connection. Work whose caller went
        away still counts until its thread is done with it.
        """
        if bounded and self._pending >= self._limit:
            self._refused += 1
            raise overloaded(f"{self._pending} prompts wait to be tokenized; try again a little later.")
        loop = asyncio.get_running_loop()
        self._pending += 1
        job = self._executor.submit(work, *args, **kwargs)
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
        return await asyncio.wrap_future(job)

    def _done(self) -> None:
        self._pending -= 1
        self._finished += 1

    async def close(self) -> None:
        """End the threads, once they have finished what they work on; what still waits is dropped."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)

    def statistics(self) -> PoolStatistics:
        """A snapshot."""
        return PoolStatistics(self._pending, self._limit, self._finished, self._refused)
