"""Shrinking: from a schedule that fails to a small one that still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from mstar.simulation.faults import Faults
from mstar.simulation.invariants import Broken
from mstar.simulation.schedule import LinearCost, Schedule, Wish, play, to_text

__all__ = ["Failure", "judge", "report", "shrink"]

_OTHER_SEEDS = 4
_replace = msgspec.structs.replace


class Failure(NamedTuple):
    """How a schedule failed: the invariant or the error's name, and the whole sentence."""

    rule: str
    message: str


Judge = Callable[[Schedule], Failure | None]


def judge(schedule: Schedule, play: Callable[[Schedule], object] = play) -> Failure | None:
    """How ``schedule`` fails when ``play`` plays it, None if it does not."""
    try:
        play(schedule)
    except Exception as error:  # noqa: BLE001 - whatever the house raises is what is looked for
        rule = error.rule if isinstance(error, Broken) else type(error).__name__
        return Failure(rule, f"{type(error).__name__}: {error}")
    return None


def shrink(schedule: Schedule, judge: Judge = judge, *, most: int = 600) -> tuple[Schedule, Failure]:
    """The smallest schedule found in ``most`` plays that breaks the same rule, and how it does.

    Raises ValueError if ``schedule`` does not fail.
    """
    failure = judge(schedule)
    if failure is None:
        raise ValueError(f"schedule {schedule.seed} does not fail")
    left = most
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(schedule):
            left -= 1
            if left < 0:
                return schedule, failure
            found = judge(candidate)
            if found is not None and found.rule == failure.rule:
                schedule, failure, smaller = candidate, found, True
                break
    return schedule, failure


def report(seed: int, schedule: Schedule, failure: Failure) -> str:
    """What to print of a failure: its seed, what broke, and the schedule to play again."""
    return (
        f"seed {seed}: {failure.message}\n"
        f"{len(schedule.wishes)} requests, {schedule.ranks} ranks, {len(schedule.nodes)} nodes;"
        " play it again with\n"
        f"python -m mstar.simulation.soak --replay '{to_text(schedule)}'"
    )


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Smaller schedules, those first that leave out most."""
    for wishes in _fewer(schedule.wishes):
        yield _replace(schedule, wishes=wishes)
    faults = schedule.faults
    if faults != Faults(restart_ns=faults.restart_ns):
        yield _replace(schedule, faults=Faults(restart_ns=faults.restart_ns))
        for name in ("deaths", "memory", "hogs", "bent"):
            for kept in _fewer(getattr(faults, name)):
                yield _replace(schedule, faults=_replace(faults, **{name: kept}))
        if faults.ranks:
            yield _replace(schedule, faults=_replace(faults, ranks=()))
    yield from _fewer_nodes(schedule)
    yield from _plainer(schedule)
    for place, wish in enumerate(schedule.wishes):
        for easier in _easier(wish):
            wishes = (*schedule.wishes[:place], easier, *schedule.wishes[place + 1 :])
            yield _replace(schedule, wishes=wishes)


def _fewer(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Without a half, a quarter, and so on down to single ones."""
    size = len(items) // 2 or len(items)
    while size:
        for start in range(0, len(items), size):
            yield items[:start] + items[start + size :]
        size //= 2


def _fewer_nodes(schedule: Schedule) -> Iterator[Schedule]:
    if schedule.ranks > 1:
        ranks = schedule.ranks - 1
        groups = tuple(tuple(rank for rank in group if rank < ranks) for group in schedule.groups)
        for seed in range(schedule.seed, schedule.seed + _OTHER_SEEDS):  # fewer ranks draw other delays
            yield _replace(schedule, seed=seed, ranks=ranks, groups=groups)
    used = {wish.node % len(schedule.nodes) for wish in schedule.wishes}
    for node in range(len(schedule.nodes)):
        if len(schedule.nodes) > 1 and node not in used:
            wishes = tuple(
                _replace(
                    wish, node=wish.node % len(schedule.nodes) - (wish.node % len(schedule.nodes) > node)
                )
                for wish in schedule.wishes
            )
            groups = schedule.groups[:node] + schedule.groups[node + 1 :]
            nodes = schedule.nodes[:node] + schedule.nodes[node + 1 :]
            yield _replace(schedule, nodes=nodes, groups=groups, wishes=wishes)


def _plainer(schedule: Schedule) -> Iterator[Schedule]:
    """With one more setting at its default."""
    if schedule.groups:
        yield _replace(schedule, groups=())
    for field in msgspec.structs.fields(Schedule):
        if field.name not in ("seed", "nodes", "wishes", "ranks", "groups", "faults"):
            default = LinearCost() if field.name == "cost" else field.default
            if getattr(schedule, field.name) != default:
                yield _replace(schedule, **{field.name: default})
    for place, node in enumerate(schedule.nodes):
        for name in ("chunked", "mixes", "prefix_cache", "prefill_cap", "target_itl_ns"):
            if name in node:
                plain = {key: value for key, value in node.items() if key != name}
                yield _replace(schedule, nodes=(*schedule.nodes[:place], plain, *schedule.nodes[place + 1 :]))


def _easier(wish: Wish) -> Iterator[Wish]:
    for name, value in (
        ("count", 1),
        ("stop_at", 0),
        ("text_at", 0),
        ("refused", False),
        ("late", False),
        ("leaves_ns", -1),
        ("at_ns", 0),
        ("prompt", 1),
        ("max_tokens", 1),
        ("prompt", wish.prompt // 2),
        ("max_tokens", wish.max_tokens // 2),
        ("prompt", wish.prompt - 1),
        ("max_tokens", wish.max_tokens - 1),
    ):
        if getattr(wish, name) != value and not (name in ("prompt", "max_tokens") and value < 1):
            yield _replace(wish, **{name: value})
