"""Workloads as data: which requests come, when, and what waits for what. Everything follows from a seed."""

from __future__ import annotations

import re
from random import Random
from typing import NamedTuple

from mstar.config.load import ConfigError

__all__ = ["WORKLOADS", "Job", "Workload", "named", "schedule"]

WORKLOADS: dict[str, str] = {
    "closed-C": "C requests in flight, 640 tokens in, 256 out, each one that ends replaced at once",
    "c48-mix": "48 in flight, prompts of 200 and 3000 tokens at 4:1, 256 out",
    "rate-R": "the same prompts, R requests a second, whatever becomes of the ones before",
    "burst-B": "16 streams decoding, then B prompts of 16k to 30k tokens at once, 16 out each",
    "mixed-8x16k": "16 streams decoding, then 8 prompts of 16,384 tokens at once, 16 out each",
    "parity-C": "24 prompts of 20k to 24k tokens, C in flight, 64 out",
    "parity-112-C": "112 such prompts",
    "long-beside-decodes": "8 streams decoding, then one prompt of 2,000 tokens",
    "short-burst": "4 streams decoding, then 4 prompts of 1,500 tokens and 8 of 32 right behind them",
}
"""Every workload, by its name; C, R and B stand for a number."""


class Job(NamedTuple):
    """One request: its group, its lengths in tokens, and its arrival in seconds after its wave begins."""

    group: str
    prompt_tokens: int
    output_tokens: int
    arrival: float = 0.0


class Workload(NamedTuple):
    """A named load.

    ``concurrency`` in flight when positive (closed loop), else jobs come at their arrivals, on average
    ``rate`` a second. ``mix`` holds (weight, shortest prompt, longest prompt, output tokens).
    ``waves`` come once every other stream has shown its first token: (group, requests, shortest, longest,
    output tokens, seconds after the moment they begin).
    """

    name: str
    requests: int
    mix: tuple[tuple[int, int, int, int], ...]
    concurrency: int = 0
    rate: float = 0.0
    waves: tuple[tuple[str, int, int, int, int, float], ...] = ()


_TWO_LENGTHS = ((4, 200, 200, 256), (1, 3000, 3000, 256))
_STREAM = (1, 640, 640, 2048)


MOST_REQUESTS = 1_000_000


def named(name: str, requests: int | None = None) -> Workload:
    """The workload called ``name``, with ``requests`` requests if given. Raises ConfigError."""
    numbers = [int(digits) for digits in re.findall(r"\d+", name)] + [requests or 0]
    if max(numbers) > MOST_REQUESTS:
        raise ConfigError(
            f"the workload {name!r} is to have {max(numbers)} requests; at most {MOST_REQUESTS} are simulated"
        )
    if match := re.fullmatch(r"closed-([1-9]\d*)", name):
        concurrency = int(match[1])
        return Workload(name, requests or 4 * concurrency, ((1, 640, 640, 256),), concurrency)
    if name == "c48-mix":
        return Workload(name, requests or 240, _TWO_LENGTHS, 48)
    if (match := re.fullmatch(r"rate-(\d+(?:\.\d+)?)", name)) and float(match[1]) > 0:
        return Workload(name, requests or 200, _TWO_LENGTHS, rate=float(match[1]))
    if match := re.fullmatch(r"burst-([1-9]\d*)", name):
        return _burst(name, requests or 16, _STREAM, ("burst", int(match[1]), 16_000, 30_000, 16, 0.0))
    if name == "mixed-8x16k":
        return _burst(name, requests or 16, _STREAM, ("burst", 8, 16_384, 16_384, 16, 0.0))
    if match := re.fullmatch(r"parity-(112-)?([1-9]\d*)", name):
        count = 112 if match[1] else 24
        return Workload(name, requests or count, ((1, 20_000, 24_000, 64),), int(match[2]))
    if name == "long-beside-decodes":
        return _burst(name, requests or 8, (1, 32, 32, 400), ("burst", 1, 2_000, 2_000, 8, 0.0))
    if name == "short-burst":
        waves = (("long", 4, 1_500, 1_500, 8, 0.0), ("short", 8, 32, 32, 8, 0.02))
        return _burst(name, requests or 4, (1, 32, 32, 400), *waves)
    raise ConfigError(f"there is no workload {name!r}; allowed are {', '.join(WORKLOADS)}")


def _burst(
    name: str,
    streams: int,
    stream: tuple[int, int, int, int],
    *waves: tuple[str, int, int, int, int, float],
) -> Workload:
    return Workload(name, streams, (stream,), streams, waves=waves)


def schedule(workload: Workload, seed: int) -> tuple[list[Job], list[Job]]:
    """The jobs of ``workload``, and those of its waves. Poisson arrivals start at 0.

    The draws are those of ``tools.bench.serving``: a prediction is of the very lengths that it measures.
    """
    random = Random(f"{workload.name} {seed}")
    weights = [weight for weight, *_ in workload.mix]
    arrival, jobs = 0.0, []
    for _ in range(workload.requests):
        (_, low, high, output) = random.choices(workload.mix, weights)[0]
        group = f"{low}" if low == high else f"{low}-{high}"
        jobs.append(Job(group, random.randint(low, high), output, arrival))
        random.getrandbits(48)
        if workload.rate:
            arrival += random.expovariate(workload.rate)
    burst = []
    for group, count, low, high, output, after in workload.waves:
        for _ in range(count):
            burst.append(Job(group, random.randint(low, high), output, after))
            random.getrandbits(48)
    return jobs, burst
