"""Many schedules: ``python -m mstar.simulation.soak --from 0 --to 100000`` plays a range of seeds.

A range can be cut anywhere: with ``--state FILE`` it goes on where it was stopped. Every failure is made
smaller and printed as text that ``--replay`` plays again. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from mstar.simulation.schedule import Schedule, check_skew, draw, from_text, play
from mstar.simulation.shrink import Failure, judge, report, shrink

__all__ = ["Range", "main", "soak"]

_SKEWED_EVERY = 16
_SAVED_EVERY = 200


class Range(msgspec.Struct, forbid_unknown_fields=True):
    """A range of seeds and how far it has come; ``failed`` are the seeds that broke something."""

    first: int
    last: int
    next: int
    steps: int = 0
    restarts: int = 0
    preempted: int = 0
    failed: list[int] = []


def soak(
    state: Range,
    *,
    drawn: Callable[[int], Schedule] = draw,
    save: Callable[[Range], None] = lambda state: None,
    tell: Callable[[str], None] = print,
    most_failures: int = 5,
) -> Range:
    """Play the seeds of ``state`` that are left; every 16th also with skewed clocks.

    ``save`` gets the state now and then and at the end, ``tell`` what failed and how far it has come.
    """
    started = time.perf_counter()
    begun = state.next
    collecting = gc.isenabled()
    gc.disable()  # worlds are cycles of many objects, collected now and then at once
    try:
        _play_range(state, drawn, save, tell, most_failures, lambda: time.perf_counter() - started, begun)
    finally:
        if collecting:
            gc.enable()
    save(state)
    return state


def _play_range(
    state: Range,
    drawn: Callable[[int], Schedule],
    save: Callable[[Range], None],
    tell: Callable[[str], None],
    most_failures: int,
    elapsed: Callable[[], float],
    begun: int,
) -> None:
    while state.next < state.last and len(state.failed) < most_failures:
        seed = state.next
        schedule = drawn(seed)
        failure = judge_and_count(schedule, state, skew=seed % _SKEWED_EVERY == 0)
        if failure is not None:
            state.failed.append(seed)
            again = judge(schedule)
            if again is not None:
                schedule, failure = shrink(schedule)
            tell(report(seed, schedule, failure))
        state.next = seed + 1
        if state.next % _SAVED_EVERY == 0:
            gc.collect()
            save(state)
            rate = elapsed() / (state.next - begun) * 1e3
            tell(f"{state.next - state.first} of {state.last - state.first} schedules, {rate:.1f} ms each")


def judge_and_count(schedule: Schedule, state: Range, *, skew: bool) -> Failure | None:
    """How ``schedule`` fails, None if it does not; what it did is added to ``state``."""

    def counted(schedule: Schedule) -> None:
        counts = play(schedule).statistics
        state.steps += counts.steps
        state.restarts += counts.restarts
        state.preempted += counts.scheduler.preempted
        if skew:
            check_skew(schedule)

    return judge(schedule, counted)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mstar.simulation.soak", description="Play random schedules."
    )
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--to", dest="last", type=int, default=1000, help="the seed after the last one")
    parser.add_argument("--state", type=Path, help="a file that keeps how far the range has come")
    parser.add_argument("--replay", help="a schedule as text, or a file of it, to play once")
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # planted failures are logged by the house as what they are
    if asked.replay is not None:
        return _replay(asked.replay)
    state = Range(asked.first, asked.last, asked.first)
    if asked.state is not None and asked.state.exists():
        found = msgspec.json.decode(asked.state.read_bytes(), type=Range)
        if (found.first, found.last) != (state.first, state.last):
            parser.error(
                f"{asked.state} holds the range {found.first} to {found.last},"
                f" not {state.first} to {state.last}: name another file"
            )
        state = found

    def save(state: Range) -> None:
        if asked.state is not None:
            asked.state.write_bytes(msgspec.json.encode(state))

    state = soak(state, save=save)
    print(
        f"{state.next - state.first} schedules, {state.steps} steps, {state.restarts} cells restarted,"
        f" {state.preempted} rows preempted, {len(state.failed)} failed"
    )
    return 1 if state.failed else 0


def _replay(text: str) -> int:
    if not text.lstrip().startswith("{"):
        text = Path(text).read_text()
    failure = judge(from_text(text))
    print(failure.message if failure else "the schedule passes")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
