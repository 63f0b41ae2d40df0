"""Sends a workload's streams and waves to a running daemon, and books each token when it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random

from mstar.client.aio import AsyncClient, AsyncStream
from mstar.client.errors import ClientError
from mstar.client.types import TextChunk
from mstar.simulation.figures import Answer
from mstar.simulation.workloads import Job, Workload, schedule

__all__ = ["drive"]

Clock = Callable[[], float]

# A word that is one token and prints at once, so that no token waits for another one's bytes.
WORD = " the"


async def drive(
    client: AsyncClient, workload: Workload, seed: int, ids: range, *, clock: Clock = time.perf_counter
) -> list[Answer]:
    """The answers of ``workload``: its streams first, then its waves; times are seconds from the start.

    Prompts are of random token ids out of ``ids``.

    Once every answer of the waves has ended the streams are cut off: what comes later is not looked at.
    """
    jobs, wave = schedule(workload, seed)
    random = Random(f"prompts {seed}")
    word = (await client.tokenize(WORD))[-1]
    sender = _Sender(client, word, random, ids, clock)
    await sender.send(Job("warm-up", 16, 4), asyncio.Event())
    sender.begin()
    shown = [asyncio.Event() for _ in jobs]
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(sender.send(job, event)) for job, event in zip(jobs, shown, strict=True)]
        for event in shown:
            await event.wait()
        waves = [group.create_task(sender.send(job, asyncio.Event(), job.arrival)) for job in wave]
        answers = [await task for task in waves]
        sender.cut()
    return [*(stream.result() for stream in streams), *answers]


class _Sender:
    """Sends one request after the other to one server."""

    def __init__(self, client: AsyncClient, word: int, random: Random, ids: range, clock: Clock) -> None:
        self._client = client
        self._word = word
        self._random = random
        self._ids = ids
        self._clock = clock
        self._zero = 0.0
        self._open: set[AsyncStream[TextChunk]] = set()
        self._cut = False

    def begin(self) -> None:
        """Times count from now on."""
        self._zero = self._clock()

    def cut(self) -> None:
        """End what is still open: those answers are short, not failed."""
        self._cut = True
        for stream in self._open:
            stream.cancel()

    async def send(self, job: Job, shown: asyncio.Event, after: float = 0.0) -> Answer:
        """Send ``job`` ``after`` seconds from now; ``shown`` is set with its first token, or its end."""
        prompt = self._random.choices(self._ids, k=job.prompt_tokens)
        if after:
            await asyncio.sleep(after)
        answer = Answer(job.group, job.prompt_tokens, self._now())
        try:
            await self._read(job, prompt, answer, shown)
        except ClientError as error:
            if not self._cut:
                answer.error = str(error)
        finally:
            shown.set()
        answer.ended = self._now()
        if not self._cut and not answer.error and len(answer.events) != job.output_tokens:
            answer.error = f"{len(answer.events)} tokens came instead of {job.output_tokens}"
        return answer

    async def _read(self, job: Job, prompt: list[int], answer: Answer, shown: asyncio.Event) -> None:
        stream = await self._client.generate(
            prompt,
            stream=True,
            max_tokens=job.output_tokens,
            temperature=0,
            ignore_eos=True,
            logit_bias={str(self._word): 100},
        )
        self._open.add(stream)
        try:
            while batch := await stream.batch():
                now = self._now()
                answer.events += [now for chunk in batch for _ in chunk.tokens]
                if answer.events:
                    shown.set()
        finally:
            self._open.discard(stream)

    def _now(self) -> float:
        return self._clock() - self._zero
