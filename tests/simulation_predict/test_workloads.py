"""Workloads: the same as those that are measured, and the same again for the same seed."""

from __future__ import annotations

import pytest

from mstar.config.load import ConfigError
from mstar.simulation.workloads import WORKLOADS, named, schedule
from tools.bench.serving import workload as measured

NAMES = ["closed-4", "c48-mix", "rate-5", "burst-8", "burst-32", "mixed-8x16k"]
OURS = ["parity-8", "parity-112-32", "long-beside-decodes", "short-burst"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_prediction_is_of_the_lengths_and_arrivals_that_are_measured(name: str, seed: int) -> None:
    jobs, burst = schedule(named(name), seed)
    theirs = measured.schedule(measured.named(name), seed)
    for mine, other in zip((jobs, burst), theirs, strict=True):
        assert [tuple(job) for job in mine] == [
            (job.group, job.prompt_tokens, job.output_tokens, job.arrival) for job in other
        ]


@pytest.mark.parametrize("name", [*NAMES, *OURS])
def test_a_seed_makes_a_workload_again_and_another_one_another(name: str) -> None:
    workload = named(name)
    assert schedule(workload, 1) == schedule(workload, 1)
    if len({*workload.mix}) > 1 or any(low < high for _, low, high, _ in workload.mix):
        assert schedule(workload, 1) != schedule(workload, 2)


def test_waves_come_in_groups_with_their_delays() -> None:
    jobs, waves = schedule(named("short-burst"), 0)
    assert [job.group for job in waves] == ["long"] * 4 + ["short"] * 8
    assert {job.arrival for job in waves if job.group == "short"} == {0.02}
    assert len(jobs) == 4


def test_the_number_of_requests_can_be_given() -> None:
    assert len(schedule(named("closed-4", 3), 0)[0]) == 3
    assert len(schedule(named("parity-112-1"), 0)[0]) == 112


@pytest.mark.parametrize("name", ["closed-0", "closed", "rate-0", "burst-x", "mixed", "closed-C", ""])
def test_a_workload_that_does_not_exist_is_told_with_those_that_do(name: str) -> None:
    with pytest.raises(ConfigError, match="short-burst") as caught:
        named(name)
    assert all(known in str(caught.value) for known in WORKLOADS)
