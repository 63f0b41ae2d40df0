"""`python -m tools.bench` lists what runs, and only that."""

from __future__ import annotations

import importlib.util

import pytest

from tools.bench.__main__ import benches


def test_the_list_names_every_bench_that_the_performance_page_runs() -> None:
    wanted = {
        "collectives",
        "host_step",
        "ipc",
        "kill_soak",
        "long_prompt",
        "matmul",
        "peers",
        "prefix_cache",
        "resend",
        "serving",
        "shm_stress",
        "slot_decode",
        "step_cost",
        "target_itl",
    }
    assert {name.removeprefix("tools.bench.") for name in benches()} == wanted


@pytest.mark.parametrize("name", list(benches()))
def test_what_is_listed_exists_and_says_what_it_measures(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    if spec.submodule_search_locations is not None:
        assert importlib.util.find_spec(f"{name}.__main__") is not None
    assert len(benches()[name]) > 20
