"""A schedule: one whole run as data. Drawn from a seed, written as text, played as often as one likes."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np

from mstar.simulation.faults import Death, Faults, Hog, OutOfMemory, RankFaults
from mstar.simulation.invariants import Broken
from mstar.simulation.oracle import MASK_BYTES
from mstar.simulation.world import Outcome, World
from mstar.worker.budget import StepWork
from mstar.worker.limits import Limits

__all__ = [
    "LinearCost",
    "Schedule",
    "Wish",
    "check_skew",
    "draw",
    "from_text",
    "limits",
    "play",
    "skewed",
    "to_text",
]

_MOST_EVENTS = 60_000
_VOCABULARY = 1000
_MANY = 1 << 16


class LinearCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step's device time: so much, and so much for each token; and the host's for each step."""

    step_ns: int = 0
    token_ns: int = 0
    step_host_ns: int = 0

    def ns(self, work: StepWork, ranks: int) -> int:
        """Device time of a step, in nanoseconds."""
        return self.step_ns + self.token_ns * work.tokens

    def host_ns(self, work: StepWork, ranks: int) -> int:
        """Host time of a step, in nanoseconds."""
        return self.step_host_ns


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request. Prompts of one ``family`` begin alike. ``leaves_ns`` is when its client leaves, or the
    gateway ends it where ``ended``; below 0 never.
    """

    at_ns: int
    prompt: int
    max_tokens: int
    family: int = 0
    node: int = 0
    count: int = 1
    stop_at: int = 0
    text_at: int = 0
    refused: bool = False
    late: bool = False
    leaves_ns: int = -1
    ended: bool = False


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A world and what happens in it. ``nodes`` are the fields of mstar.worker.limits.Limits."""

    seed: int
    nodes: tuple[dict[str, int], ...]
    wishes: tuple[Wish, ...]
    ranks: int = 1
    groups: tuple[tuple[int, ...], ...] = ()
    inline: bool = False
    cost: LinearCost = LinearCost()
    faults: Faults = Faults()
    channel_delay_ns: int = 0
    ring_delay_ns: int = 0
    channel_records: int = _MANY
    prompts: int = _MANY
    replays: int = 64
    ring_slots: int = 8
    capacity: int = _MANY


def play(schedule: Schedule) -> Outcome:
    """Run ``schedule``. Raises what breaks."""
    world = World(
        [limits(node) for node in schedule.nodes],
        ranks=schedule.ranks,
        groups=schedule.groups or None,
        cost=schedule.cost,
        seed=schedule.seed,
        faults=schedule.faults,
        inline=schedule.inline,
        capacity=schedule.capacity,
        channel_delay_ns=schedule.channel_delay_ns,
        ring_delay_ns=schedule.ring_delay_ns,
        channel_records=schedule.channel_records,
        prompts=schedule.prompts,
        replays=schedule.replays,
        ring_slots=schedule.ring_slots,
        most_events=_MOST_EVENTS,
    )
    for wish in schedule.wishes:
        request = world.submit(
            wish.at_ns,
            prompt_of(schedule.seed, wish),
            wish.max_tokens,
            node=wish.node % len(schedule.nodes),
            count=wish.count,
            stop_at=wish.stop_at,
            text_at=wish.text_at,
            refused=wish.refused,
            late=wish.late,
        )
        if wish.leaves_ns >= 0:
            leave = world.abort if wish.ended else world.disconnect
            leave(wish.leaves_ns, request)
    return world.run()


def check_skew(schedule: Schedule) -> None:
    """No rank's clock decides anything: however they are off, the same steps run. Raises Broken."""
    plain, off = play(schedule), play(skewed(schedule, 3_333_333_333))
    for mine, other in zip(plain.steps, off.steps, strict=False):
        if mine != other:
            raise Broken("clock", f"step {mine.seq} is another one when clocks are off: {mine}, {other}")
    if len(plain.steps) != len(off.steps) or plain.events != off.events:
        raise Broken("clock", f"{len(plain.steps)} steps become {len(off.steps)} when clocks are off")


def limits(node: dict[str, int]) -> Limits:
    """The limits of one node of a schedule."""
    fields: dict[str, Any] = dict(node)
    for name in ("chunked", "mixes", "prefix_cache"):
        if name in fields:
            fields[name] = bool(fields[name])
    return Limits(**fields)


def prompt_of(seed: int, wish: Wish) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The tokens of a wish: the beginning of its family's."""
    start = (seed * 1009 + wish.family * 7919) % _VOCABULARY
    return (np.arange(start, start + wish.prompt, dtype=np.int32) * 31) % _VOCABULARY


def skewed(schedule: Schedule, skew_ns: int) -> Schedule:
    """The same schedule with every rank's clock off by a different multiple of ``skew_ns``."""
    old = schedule.faults
    ranks = tuple(
        msgspec.structs.replace(old.of_rank(rank), skew_ns=skew_ns * (rank + 1))
        for rank in range(schedule.ranks)
    )
    return msgspec.structs.replace(schedule, faults=msgspec.structs.replace(old, ranks=ranks))


def to_text(schedule: Schedule) -> str:
    """``schedule`` as one line of JSON; what is at its default is left out."""
    return msgspec.json.encode(_short(msgspec.to_builtins(schedule), Schedule)).decode()


def from_text(text: str | bytes) -> Schedule:
    """The schedule that ``to_text`` wrote. Raises msgspec.ValidationError."""
    return msgspec.json.decode(text, type=Schedule)


def _short(value: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """``value`` without the fields of ``kind`` that are at their defaults."""
    kept = {}
    for field in msgspec.structs.fields(kind):
        found = value[field.encode_name]
        default = field.default
        if default is not msgspec.NODEFAULT and found == msgspec.to_builtins(default):
            continue
        kept[field.name] = found
    for name, inner in (("faults", Faults), ("cost", LinearCost)):
        if kind is Schedule and name in kept:
            kept[name] = _short(kept[name], inner)
    if kind is Schedule:
        kept["wishes"] = [_short(wish, Wish) for wish in kept["wishes"]]
    return kept


# ---- drawing ---------------------------------------------------------------------------------


def draw(seed: int) -> Schedule:
    """The random schedule of ``seed``: small worlds in which much goes wrong."""
    random = Random(seed)
    ranks = random.choice((1, 1, 2, 2, 2, 3, 4))
    count = random.choice((1, 1, 1, 2, 2, 3))
    depth = random.choice((0, 1, 1, 2))
    nodes = tuple(_node(random, depth) for _ in range(count))
    groups: tuple[tuple[int, ...], ...] = ()
    if ranks > 1 and count > 1 and random.random() < 0.5:
        groups = tuple(
            tuple(sorted({0, *random.sample(range(ranks), random.randint(1, ranks))})) for _ in nodes
        )
    span = random.choice((0, 0, 30_000, 300_000))
    wishes = tuple(_wish(random, nodes, span) for _ in range(random.choice((1, 3, 5, 8, 12))))
    step_ns = random.choice((0, 2_000, 10_000, 50_000))
    return Schedule(
        seed=seed,
        nodes=nodes,
        wishes=tuple(sorted(wishes, key=lambda wish: wish.at_ns)),
        ranks=ranks,
        groups=groups,
        inline=random.random() < 0.4,
        cost=LinearCost(step_ns, random.choice((0, 500)), random.choice((0, 0, 2_000))),
        faults=_faults(random, ranks, span),
        channel_delay_ns=random.choice((0, 2_000, 30_000, 200_000)),
        ring_delay_ns=random.choice((0, 2_000, 30_000, 200_000)),
        channel_records=_rarely(random, _MANY, 4, 1),
        prompts=_rarely(random, _MANY, 4, 2),
        replays=_rarely(random, 64, 1),
        ring_slots=random.choice((3, 4, 8)),
        capacity=_rarely(random, _MANY, 4),
    )


def _rarely(random: Random, usual: int, *others: int) -> int:
    """``usual``, and one time in eight one of ``others``."""
    return usual if random.random() < 0.875 else random.choice(others)


def _node(random: Random, depth: int) -> dict[str, int]:
    slots = random.choice((1, 2, 3, 5, 8, 8))
    page_size = random.choice((1, 2, 4, 8))
    max_seq_len = random.choice((16, 32, 48))
    row = -(-max_seq_len // page_size)
    node = {
        "slots": slots,
        "max_seq_len": max_seq_len,
        "pages": random.choice((row, row + slots, 2 * row, (slots + 1) * row // 2, slots * row)),
        "page_size": page_size,
        "batch_tokens": slots + random.choice((0, 1, 4, 12, 60)),
        "min_chunk_tokens": random.choice((1, 3, 8, 16)),
        "depth": depth,
        "max_waiting": _rarely(random, 64, 2),
        "tail_bytes": _rarely(random, 4096, 640),
        "horizon_tokens": random.choice((1, 1, 4, 256)),
    }
    if random.random() < 0.15:
        node["chunked"] = 0
    if random.random() < 0.1:
        node["mixes"] = 0
    if random.random() < 0.3:
        node["prefix_cache"] = 0
    if random.random() < 0.15:
        node["prefill_cap"] = random.choice((4, 16))
    if random.random() < 0.15:
        node["target_itl_ns"] = random.choice((1_000, 20_000, 60_000))
    if random.random() < 0.2:
        node["mask_bytes"] = MASK_BYTES
    return node


def _wish(random: Random, nodes: tuple[dict[str, int], ...], span: int) -> Wish:
    node = random.randrange(len(nodes))
    most = nodes[node]["max_seq_len"]
    misfit = random.random() < 0.02
    max_tokens = random.choice((1, 2, 3, 5, 8, 12, 14))
    prompt = random.randint(1, most - max_tokens) if random.random() < 0.5 else random.randint(1, 6)
    at_ns = random.randint(0, span)
    count = random.choice((1, 1, 1, 1, 2, 3))
    fate = random.random()
    return Wish(
        at_ns=at_ns,
        prompt=most if misfit else min(prompt, most - max_tokens),
        max_tokens=max_tokens,
        family=random.choice((0, 0, 0, 1, random.randint(2, 9))),
        node=node,
        count=count,
        stop_at=random.randint(1, max_tokens) if random.random() < 0.2 else 0,
        text_at=random.randint(1, max_tokens) if random.random() < 0.1 else 0,
        refused=random.random() < 0.03,
        late="mask_bytes" in nodes[node] and random.random() < 0.5,
        leaves_ns=at_ns + int(random.random() ** 2 * 600_000) if fate < 0.25 else -1,
        ended=fate < 0.08,
    )


def _faults(random: Random, ranks: int, span: int) -> Faults:
    deaths: tuple[Death, ...] = ()
    memory: tuple[OutOfMemory, ...] = ()
    hogs: tuple[Hog, ...] = ()
    bent: tuple[tuple[int, int], ...] = ()
    if random.random() < 0.25:
        deaths = tuple(
            Death(int(random.random() ** 2 * 500), random.randrange(ranks), random.choice((0, 100_000)))
            for _ in range(random.choice((1, 1, 2)))
        )
    if random.random() < 0.1:
        memory = (OutOfMemory(random.randint(1, 12), random.randrange(ranks)),)
    if random.random() < 0.2:
        hogs = tuple(
            Hog(
                random.randint(0, span + 200_000),
                random.randint(1, 500_000),
                random.randrange(3),
                random.randint(1, 40),
            )
            for _ in range(random.randint(1, 3))
        )
    if ranks > 1 and random.random() < 0.03:
        bent = ((random.randint(1, 12), random.randrange(1, ranks)),)
    sound = tuple(
        RankFaults(random.randint(-5, 5) * 1_000_000_000, 1.0, random.choice((1.0, 1.0, 1.0, 3.0)))
        for _ in range(ranks)
    )
    return Faults(deaths, memory, hogs, bent, sound, random.choice((0, 200_000)))
