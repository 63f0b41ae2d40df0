"""A model of x86-64's store buffers that runs the real Bell and Sleeper through every interleaving.

A store waits in its process's buffer until a fence or the end; a load sees its own buffer first, then memory.
That is the laziest order the processor may choose, and the one that loses wake-ups.
"""

from __future__ import annotations

import itertools
import threading
from typing import cast
from unittest.mock import patch

from shm.board import Line
from shm.doorbell import Doorbell
from shm.wait import Bell, Sleeper

_HEAD, _EPOCH = 0, 1
_BOUND = 5.0  # seconds


class _Turns:
    """Lets two threads access memory in a given order; who is not named any more runs freely."""

    def __init__(self, order: tuple[str, ...]) -> None:
        self._order = list(order)
        self._changed = threading.Condition()

    def take(self, who: str) -> None:
        with self._changed:
            if not self._changed.wait_for(
                lambda: not self._order or self._order[0] == who or who not in self._order, _BOUND
            ):
                raise TimeoutError(f"{who} never had its turn in {self._order}")
            if self._order and self._order[0] == who:
                self._order.pop(0)
            self._changed.notify_all()

    def leave(self, who: str) -> None:
        with self._changed:
            self._order = [name for name in self._order if name != who]
            self._changed.notify_all()


class _Words:
    """One process's view of the shared words."""

    def __init__(self, who: str, memory: dict[int, int], turns: _Turns) -> None:
        self._who, self._memory, self._turns = who, memory, turns
        self._buffer: dict[int, int] = {}

    def __setitem__(self, index: int, value: int) -> None:
        self._turns.take(self._who)
        self._buffer[index] = value

    def __getitem__(self, index: int) -> int:
        self._turns.take(self._who)
        return self._buffer.get(index, self._memory.get(index, 0))

    def flush(self) -> None:
        self._memory.update(self._buffer)
        self._buffer.clear()


class _Line:
    """Stands in for a board line on a process's own view of memory."""

    def __init__(self, words: _Words) -> None:
        self.words, self.offset, self.epoch = words, _EPOCH, 0


class _Silent:
    def ring(self) -> None:
        pass


def lost_schedules(*, producer_fence: bool, consumer_fence: bool) -> list[tuple[str, ...]]:
    """The orders of accesses after which the consumer sleeps, there is work, and nobody rang."""
    lost = []
    for places in itertools.combinations(range(5), 2):
        order = tuple("producer" if i in places else "consumer" for i in range(5))
        if _is_lost(order, producer_fence, consumer_fence):
            lost.append(order)
    return lost


def _is_lost(order: tuple[str, ...], producer_fence: bool, consumer_fence: bool) -> bool:
    memory: dict[int, int] = {}
    turns = _Turns(order)
    views = {who: _Words(who, memory, _Turns(())) for who in ("producer", "consumer")}
    bell = Bell(cast(Line, _Line(views["producer"])), cast(Doorbell, _Silent()))
    sleeper = Sleeper(cast(Line, _Line(views["consumer"])))
    for view in views.values():
        view.flush()
        view._turns = turns
    fenced = {"producer": producer_fence, "consumer": consumer_fence}
    outcome: dict[str, bool] = {}

    def fence() -> None:
        who = threading.current_thread().name
        if fenced[who]:
            views[who].flush()

    def produce() -> None:
        views["producer"][_HEAD] = 1
        outcome["rang"] = bell.notify()

    def consume() -> None:
        outcome["sleeps"] = sleeper.announce(lambda: views["consumer"][_HEAD] == 1)

    def play(who: str) -> None:
        try:
            {"producer": produce, "consumer": consume}[who]()
        finally:
            turns.leave(who)

    with patch("shm.wait.fence", fence):
        threads = [threading.Thread(target=play, args=(who,), name=who) for who in views]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_BOUND)
    return outcome["sleeps"] and not outcome["rang"]
