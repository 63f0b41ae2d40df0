"""Poll, spin, announce, re-check, sleep, ring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm.board import Board
from shm.doorbell import Doorbell
from shm.wait import Bell, Sleeper, spin_budget


class House:
    """One sleeper, one producer, a flag for work."""

    def __init__(self) -> None:
        self.board = Board.create(1)
        self.doorbell = Doorbell.create()
        self.line = self.board.line(0)
        self.sleeper = Sleeper(self.line)
        self.bell = Bell(self.line, self.doorbell)
        self.work = False

    def has_work(self) -> bool:
        return self.work


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.board.close()
    house.doorbell.close()


def test_who_is_awake_is_not_rung(house: House) -> None:
    assert not house.bell.notify()
    assert house.doorbell.drain() == 0


def test_a_burst_rings_a_sleeper_once(house: House) -> None:
    assert house.sleeper.announce(house.has_work)
    assert [house.bell.notify() for _ in range(5)] == [True, False, False, False, False]
    assert house.doorbell.drain() == 1
    assert house.bell.rings == 1


def test_every_sleep_is_rung_anew(house: House) -> None:
    for _ in range(3):
        assert house.sleeper.announce(house.has_work)
        assert house.bell.notify()
        house.sleeper.awake()
        assert not house.bell.notify()
    assert house.doorbell.drain() == 3


def test_two_producers_each_ring_the_same_sleep(house: House) -> None:
    other = Bell(house.line, house.doorbell)
    house.sleeper.announce(house.has_work)
    assert house.bell.notify()
    assert other.notify()


def test_announcing_twice_is_one_more_sleep_that_is_rung(house: House) -> None:
    house.sleeper.announce(house.has_work)
    house.bell.notify()
    house.sleeper.announce(house.has_work)
    assert house.line.epoch & 1
    assert house.bell.notify()


def test_work_that_came_before_the_announcement_forbids_the_sleep(house: House) -> None:
    house.work = True
    assert not house.sleeper.announce(house.has_work)
    assert house.line.epoch & 1 == 0
    assert not house.bell.notify()
    assert house.sleeper.statistics().rechecks == 1


def test_awake_twice_does_not_read_as_asleep(house: House) -> None:
    house.sleeper.announce(house.has_work)
    house.sleeper.awake()
    house.sleeper.awake()
    assert house.line.epoch & 1 == 0


def test_the_successor_of_an_actor_that_died_asleep_is_rung_by_its_old_peers(house: House) -> None:
    house.sleeper.announce(house.has_work)
    house.bell.notify()
    successor = Sleeper(house.line)
    assert not house.bell.notify()
    assert successor.announce(house.has_work)
    assert house.bell.notify()


def test_a_spin_ends_with_the_budget(house: House) -> None:
    now = iter(range(0, 1000, 10))
    assert not house.sleeper.spin(house.has_work, 50, lambda: next(now))
    assert next(now) == 60
    assert house.sleeper.statistics()[:2] == (1, 0)


def test_a_spin_ends_with_the_first_work(house: House) -> None:
    def clock() -> int:
        house.work = True
        return 0

    assert house.sleeper.spin(house.has_work, 50, clock)
    assert house.sleeper.statistics()[:2] == (1, 1)


def test_without_a_budget_nobody_spins(house: House) -> None:
    def clock() -> int:
        raise AssertionError("a spin looked at the clock")

    assert not house.sleeper.spin(house.has_work, 0, clock)
    house.work = True
    assert house.sleeper.spin(house.has_work, 0, clock)
    assert house.sleeper.statistics().spins == 0


@pytest.mark.behaviour("F-02")
def test_a_safety_poll_finds_work_whose_ring_was_lost_and_counts_it(house: House) -> None:
    house.sleeper.announce(house.has_work)
    house.work = True
    house.bell.notify()
    house.doorbell.drain()  # the ring is lost
    assert house.sleeper.safety_poll(house.has_work, rung=False)
    house.sleeper.awake()
    seen = house.sleeper.statistics()
    assert (seen.safety_polls, seen.lost) == (1, 1)


def test_a_safety_poll_that_finds_nothing_or_a_late_ring_loses_nothing(house: House) -> None:
    assert not house.sleeper.safety_poll(house.has_work, rung=False)
    house.work = True
    assert house.sleeper.safety_poll(house.has_work, rung=True)
    seen = house.sleeper.statistics()
    assert (seen.safety_polls, seen.lost) == (2, 0)


@pytest.mark.behaviour("F-13")
@pytest.mark.parametrize(
    ("cores", "actors", "gap", "budget"),
    [
        (2, 2, 100_000, 0),  # spinning would take the core of the peer
        (3, 2, 100_000, 125_000),
        (3, 2, 1_000, 20_000),
        (16, 8, 5_000_000, 6_250_000),
        (16, 8, 5_000_001, 0),  # a wake-up costs little beside such a gap
        (16, 8, 0, 0),  # idle
    ],
)
def test_the_spin_budget_follows_cores_and_the_expected_gap(
    cores: int, actors: int, gap: int, budget: int
) -> None:
    assert spin_budget(cores, actors, gap) == budget
