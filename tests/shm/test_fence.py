"""The barrier, and the refusal to run without it."""

from __future__ import annotations

import os

import pytest

from shm.errors import UnsupportedPlatform
from shm.fence import require_platform
from tests.shm.tso import lost_schedules
from tools.bench.shm_stress import litmus


@pytest.mark.parametrize(
    ("system", "machine", "bits"),
    [("linux", "aarch64", 64), ("darwin", "x86_64", 64), ("linux", "x86_64", 32), ("win32", "amd64", 64)],
)
def test_other_platforms_are_refused_by_name(system: str, machine: str, bits: int) -> None:
    with pytest.raises(UnsupportedPlatform, match=f"{system} on {machine}"):
        require_platform(system, machine, bits)


def test_this_platform_is_taken() -> None:
    require_platform()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes must run at the same time")
def test_a_fenced_store_is_never_overtaken_by_the_load_after_it() -> None:
    assert litmus(30_000, fenced=True) == 0


def test_with_both_fences_no_interleaving_loses_a_wake_up() -> None:
    assert lost_schedules(producer_fence=True, consumer_fence=True) == []


@pytest.mark.parametrize(("producer", "consumer"), [(False, True), (True, False), (False, False)])
def test_without_one_of_the_fences_some_interleaving_loses_a_wake_up(producer: bool, consumer: bool) -> None:
    assert lost_schedules(producer_fence=producer, consumer_fence=consumer)
