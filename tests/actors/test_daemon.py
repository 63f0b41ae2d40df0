"""A tree of processes from outside: nothing outlives the daemon or is left in /dev/shm, and idle is idle."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.segment import sweep
from tests.actors.houses import alive
from tests.helpers import wait_until

ROOT = Path(__file__).parents[2]


class Tree:
    """A daemon's process and its children."""

    def __init__(self, *arguments: str) -> None:
        self.daemon = subprocess.Popen(
            [sys.executable, "-m", "tests.actors.daemon", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.seen: set[int] = {self.daemon.pid}

    def ready(self) -> dict[str, int]:
        """The actors' pids, once all are ready."""
        assert self.daemon.stdout is not None
        actors: dict[str, int] = json.loads(self.daemon.stdout.readline())
        self.seen.update(actors.values())
        return actors

    def pids(self) -> list[int]:
        """The daemon's and its living children's, noted in `seen`."""
        pids = [self.daemon.pid]
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            path = Path(f"/proc/{self.daemon.pid}/task/{self.daemon.pid}/children")
            pids += map(int, path.read_text().split())
        self.seen.update(pids)
        return pids

    def gone(self) -> bool:
        self.daemon.poll()
        return not any(alive(pid)() for pid in self.seen)

    def close(self) -> None:
        self.daemon.kill()
        self.daemon.wait()
        assert self.daemon.stdout is not None
        self.daemon.stdout.close()


@contextlib.contextmanager
def tree(*arguments: str) -> Iterator[Tree]:
    found = Tree(*arguments)
    try:
        yield found
    finally:
        found.close()


def ours() -> set[str]:
    return set(os.listdir("/dev/shm"))


def cpu(pid: int) -> float:
    """Seconds of CPU that all threads of a process have used."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


@pytest.mark.behaviour("F-08")
def test_a_killed_daemon_takes_its_actors_along() -> None:
    with tree() as house:
        actors = house.ready()
        assert all(alive(pid)() for pid in actors.values())
        house.daemon.kill()
        wait_until(house.gone, 2.0)


@pytest.mark.behaviour("F-08")
def test_a_daemon_killed_while_its_actors_start_takes_them_along() -> None:
    with tree() as house:
        wait_until(lambda: len(house.pids()) == 3)
        house.daemon.kill()
        wait_until(house.gone, 2.0)


def test_a_daemon_that_stops_in_order_leaves_nothing() -> None:
    with tree() as house:
        house.ready()
        house.daemon.send_signal(signal.SIGTERM)
        assert house.daemon.wait(10.0) == 0
        assert house.gone()


def pass_time(house: Tree, seconds: float) -> None:
    """Let the house run for a while, noting whatever children it has."""
    until = time.monotonic() + seconds
    wait_until(lambda: house.pids() and time.monotonic() >= until)


@pytest.mark.behaviour("F-07")
@pytest.mark.parametrize("seed", range(5))
def test_processes_killed_at_random_moments_leave_no_process_and_no_memory(seed: int) -> None:
    dice = random.Random(seed)
    before = ours()
    with tree() as house:
        pass_time(house, dice.uniform(0.0, 1.5))  # sometimes still in the start, else under load
        for _ in range(3):
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(house.pids()), signal.SIGKILL)
            pass_time(house, dice.uniform(0.0, 0.3))
        house.daemon.kill()
        wait_until(house.gone, 2.0)
    sweep()  # the next start does this: for a daemon killed between creating a name and unlinking it
    assert ours() <= before


@pytest.mark.behaviour("F-07")
def test_a_tree_killed_all_at_once_leaves_nothing_and_the_next_one_starts() -> None:
    before = ours()
    with tree() as house:
        house.ready()
        for pid in house.pids():
            os.kill(pid, signal.SIGKILL)
        wait_until(house.gone, 2.0)
        assert ours() <= before
    with tree() as house:
        assert len(house.ready()) == 2


@pytest.mark.behaviour("F-13")
def test_an_idle_house_uses_less_than_a_hundredth_of_a_core_per_process() -> None:
    with tree("1") as house:
        actors = house.ready()
        pids = {"daemon": house.daemon.pid, **actors}
        began = {name: cpu(pid) for name, pid in pids.items()}
        moment = time.monotonic()
        pass_time(house, 2.0)
        window = time.monotonic() - moment
        used = {name: cpu(pid) - began[name] for name, pid in pids.items()}
        assert all(seconds < 0.01 * window for seconds in used.values()), used
        assert min(used.values()) > 0  # they live
