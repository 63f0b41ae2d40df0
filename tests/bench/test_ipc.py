"""The figures of the ipc measurement, and one small run of every transport."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("zmq")

from tools.bench.ipc.__main__ import main
from tools.bench.ipc.report import plot, ratios, summarise, table
from tools.bench.ipc.session import TRANSPORTS, Plan, session
from tools.bench.ipc.tasks import Sample

QUEUED = 60_000


def steps(transport: str, microseconds: int, queued: int = 0) -> list[Sample]:
    return [Sample(microseconds * 1000, 0, queued)] * 100


def test_samples_that_queued_for_a_core_are_not_clean() -> None:
    row = summarise("step", 48, "zmq", [*steps("zmq", 10), *steps("zmq", 90, QUEUED)])
    assert (row.p50, row.p99, row.clean_p50, row.clean_p99, row.clean_share) == (50.0, 90.0, 10.0, 10.0, 0.5)
    assert row.one_way_p50 is None


def test_without_a_clean_sample_there_are_no_clean_figures() -> None:
    row = summarise("message", 200, "uds", steps("uds", 10, QUEUED))
    assert (row.clean_p50, row.clean_p99, row.clean_share) == (None, None, 0.0)
    assert "-" in table([row])


def test_the_claim_compares_raw_figures_with_raw_ones() -> None:
    ours = summarise("step", 48, "ring hot", [*steps("", 10), *steps("", 50, QUEUED)])
    theirs = summarise("step", 48, "zmq", steps("", 300))
    assert ratios([ours, theirs]) == {"p50": 10.0, "p99": 6.0, "p99_ours_clean": 30.0}
    assert ratios([ours]) == {}


def test_the_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "ipc.png"
    assert plot([summarise("step", 48, "zmq", steps("", 300))], path)
    assert path.stat().st_size > 1000


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("task", ["messages", "steps"])
def test_every_transport_carries_messages_and_steps(transport: str, task: str) -> None:
    plan = Plan((transport,), (200, 70_000), (3, 1024), samples=5, loop="asyncio", pin=False)
    with asyncio.Runner() as runner:
        found = runner.run(session(plan, transport, task))
    assert {size: len(samples) for size, samples in found.items()} == dict.fromkeys(
        (3, 1024) if task == "steps" else (200, 70_000), 5
    )
    assert all(sample.round_trip > sample.one_way >= 0 for samples in found.values() for sample in samples)


def test_an_unknown_transport_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--transports", "pigeon"])
    assert "'pigeon'" in capsys.readouterr().err
