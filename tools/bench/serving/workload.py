"""Workloads: which requests are sent, and when. Everything follows from a seed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

import msgspec

__all__ = ["WORKLOADS", "Job", "Workload", "named", "prompt_text", "prompt_tokens", "schedule"]

WORKLOADS = (
    "closed-C (C in flight, 640 in, 256 out), c48-mix (48 in flight, 200 and 3000 in at 4:1, 256 out), "
    "rate-R (the same prompts, R requests a second, Poisson), burst-B (16 streams decoding, then B prompts "
    "of 16k to 30k at once, 16 out), mixed-8x16k (the same with 8 prompts of 16,384)"
)

# Common English words that are one token, or nearly, in most vocabularies.
# fmt: off
_WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week",
    "company", "system", "program", "question", "work", "number", "night", "point", "home", "water", "room",
    "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job",
    "word", "business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power",
    "hour", "game", "line", "end", "member", "law", "car", "city", "community", "name", "president", "team",
]
# fmt: on


class Job(msgspec.Struct, frozen=True):
    """One request: its group, its lengths in tokens, and in an open loop its arrival in seconds.

    The prompt follows from ``seed``, unless ``ids`` gives it.
    """

    group: str
    prompt_tokens: int
    output_tokens: int
    arrival: float = 0.0
    seed: int = 0
    ids: tuple[int, ...] = ()


class Workload(msgspec.Struct, frozen=True):
    """A named load.

    ``concurrency`` in flight when positive (closed loop); else ``rate`` requests a second (open loop).
    ``mix`` holds (weight, shortest prompt, longest prompt, output tokens). A ``burst`` is sent at once,
    after the other streams have begun to decode.
    """

    name: str
    requests: int
    mix: tuple[tuple[int, int, int, int], ...]
    concurrency: int = 0
    rate: float = 0.0
    burst: int = 0
    burst_mix: tuple[int, int, int] = (0, 0, 0)


_TWO_LENGTHS = ((4, 200, 200, 256), (1, 3000, 3000, 256))


def named(name: str, requests: int | None = None) -> Workload:
    """The workload called ``name``; raises ValueError naming those that exist."""
    if match := re.fullmatch(r"closed-(\d+)", name):
        concurrency = int(match[1])
        return Workload(name, requests or 4 * concurrency, ((1, 640, 640, 256),), concurrency)
    if name == "c48-mix":
        return Workload(name, requests or 240, _TWO_LENGTHS, 48)
    if match := re.fullmatch(r"rate-(\d+(?:\.\d+)?)", name):
        return Workload(name, requests or 200, _TWO_LENGTHS, rate=float(match[1]))
    if match := re.fullmatch(r"burst-(\d+)", name):
        return _burst(name, requests, int(match[1]), (16_000, 30_000, 16))
    if name == "mixed-8x16k":
        return _burst(name, requests, 8, (16_384, 16_384, 16))
    raise ValueError(f"There is no workload {name!r}; there are: {WORKLOADS}.")


def _burst(name: str, streams: int | None, burst: int, mix: tuple[int, int, int]) -> Workload:
    decoding = streams or 16
    return Workload(name, decoding, ((1, 640, 640, 2048),), decoding, burst=burst, burst_mix=mix)


def schedule(workload: Workload, seed: int) -> tuple[list[Job], list[Job]]:
    """The jobs of ``workload``, and those of its burst. Poisson arrivals start at 0."""
    random = Random(f"{workload.name} {seed}")
    weights = [weight for weight, *_ in workload.mix]
    arrival, jobs = 0.0, []
    for _ in range(workload.requests):
        (_, low, high, output) = random.choices(workload.mix, weights)[0]
        group = f"{low}" if low == high else f"{low}-{high}"
        jobs.append(Job(group, random.randint(low, high), output, arrival, random.getrandbits(48)))
        if workload.rate:
            arrival += random.expovariate(workload.rate)
    low, high, output = workload.burst_mix
    burst = [
        Job("burst", random.randint(low, high), output, 0.0, random.getrandbits(48))
        for _ in range(workload.burst)
    ]
    return jobs, burst


def prompt_tokens(job: Job, vocab_size: int) -> list[int]:
    """``job.prompt_tokens`` ids, different for every job, away from the special ids at the front."""
    if job.ids:
        return list(job.ids)
    random = Random(job.seed)
    return [random.randrange(min(1000, vocab_size // 2), vocab_size) for _ in range(job.prompt_tokens)]


def prompt_text(job: Job) -> str:
    """About ``job.prompt_tokens`` tokens of words; the server's usage says how many they were."""
    return " ".join(_words(job))


def _words(job: Job) -> Iterator[str]:
    random = Random(job.seed)
    for _ in range(job.prompt_tokens):
        yield random.choice(_WORDS)
