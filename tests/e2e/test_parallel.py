"""A server whose model is split over two ranks: streams, aborts, deaths, a corrupted step, refusals."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from mstar.client.errors import ClientError, ConnectionLost, ServerError
from mstar.config.schema import Deployment
from mstar.daemon.compose import Address, compose
from mstar.messages.step import COUNTER
from mstar.model.files import ModelFiles
from shm.errors import LayoutMismatch
from shm.steps import StepLayout, StepRing
from tests.e2e.server import Server, gone, mstar
from tests.e2e.test_kills import Streaming
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.waiting import wait_until
from tests.worker.planted import slot_digest

pytestmark = pytest.mark.timeout(120)

PROMPT = "the quick brown fox " * 40


@pytest.fixture(scope="module")
def parallel(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(model, tmp_path_factory.mktemp("tp"), "--tp", 2, "--max-num-batched-tokens", 64) as found:
        yield found


def answer(server: Server, prompt: str, count: int) -> str:
    with server.client() as client:
        return str(client.generate(prompt, max_tokens=count, ignore_eos=True, temperature=0).text)


def idle(server: Server) -> dict[str, Any]:
    """The figures of the rank that decides, once it holds nothing any more."""
    with server.client() as client:

        def still() -> dict[str, Any] | None:
            status = client.status()
            rank, slab = status["ranks"]["rank/0"], status["rings"]["prompts/0"]
            clean = rank["running"] == rank["waiting"] == slab["leased"] == 0
            full = rank["pages_free"] + rank["pages_cached"] == rank["pages_total"]
            return rank if clean and full else None

        found: dict[str, Any] = wait_until(still, 10, what="every page, slot and block to be back")
        return found


@pytest.mark.behaviour("S0-31")
def test_two_ranks_stream_what_one_rank_says(parallel: Server, model: Path, folder: Path) -> None:
    with Server(model, folder, "--max-num-batched-tokens", "off") as one:
        expected = [answer(one, prompt, 24) for prompt in ("the", PROMPT)]
    assert [answer(parallel, prompt, 24) for prompt in ("the", PROMPT)] == expected
    with parallel.client() as client:
        chunks = list(client.generate("the", max_tokens=24, ignore_eos=True, temperature=0, stream=True))
        assert "".join(chunk.text for chunk in chunks) == expected[0]
        assert len(chunks) > 10

    def steps() -> list[int]:
        actors = parallel.actors()
        return [actors[name]["step"] for name in ("rank/0", "rank/1")]

    wait_until(lambda: len(set(steps())) == 1 and steps()[0] > 0, what="both ranks to be at the same step")


@pytest.mark.behaviour("S0-30", "B-08")
def test_clients_that_leave_while_their_prompt_runs_leave_both_ranks_clean(parallel: Server) -> None:
    for _ in range(3):
        reading = Streaming(parallel)
        reading.client.close()
        reading.thread.join(30)
        with parallel.client() as client:
            stream = client.generate(PROMPT, max_tokens=500, ignore_eos=True, stream=True)
            next(iter(stream))
    idle(parallel)
    assert answer(parallel, "the", 4)


@pytest.mark.behaviour("S0-95")
def test_a_prompt_sent_again_is_found_in_the_prefix_cache(parallel: Server) -> None:
    text = "a tale of " + PROMPT
    first = answer(parallel, text, 8)
    before = idle(parallel)["cached_tokens"]
    assert answer(parallel, text, 8) == first
    wait_until(lambda: idle(parallel)["cached_tokens"] - before > 100, 10, what="the rank to report the hit")


def revived(server: Server) -> str:
    """Wait until the cell serves again; the line of the log that tells why it had died."""
    with server.client() as client:
        wait_until(client.ready, 60, what="the cell to be back")
    lines = server.log.read_text().splitlines()
    return next(line for line in reversed(lines) if "restarting: " in line)


@pytest.mark.behaviour("F-07", "F-08", "B-09")
def test_a_killed_follower_restarts_the_whole_cell(parallel: Server) -> None:
    expected = answer(parallel, "the", 12)
    reading, before = Streaming(parallel), parallel.actors()
    ranks = ("rank/0", "rank/1")
    cell = [psutil.Process(before[name]["pid"]) for name in ranks]
    os.kill(before["rank/1"]["pid"], signal.SIGKILL)
    error = reading.end()
    assert isinstance(error, ServerError)
    assert "rank/1" in str(error)
    assert "SIGKILL" in str(error)
    gone(cell)
    assert "actor rank/1" in revived(parallel)
    after = parallel.actors()
    assert [after[name]["generation"] - before[name]["generation"] for name in ranks] == [1, 1]
    assert after["gateway/0"]["pid"] == before["gateway/0"]["pid"]
    assert answer(parallel, "the", 12) == expected


def test_a_killed_gateway_leaves_both_ranks_serving(parallel: Server) -> None:
    expected = answer(parallel, "the", 6)
    reading, before = Streaming(parallel), parallel.actors()
    os.kill(before["gateway/0"]["pid"], signal.SIGKILL)
    assert isinstance(reading.end(), ConnectionLost)
    with parallel.client() as client:
        wait_until(client.ready, 60, excuse=(ClientError,), what="the gateway to be back")
    assert answer(parallel, "the", 6) == expected
    assert answer(parallel, PROMPT, 6)
    after = parallel.actors()
    assert [after[name]["pid"] for name in ("rank/0", "rank/1")] == [
        before[name]["pid"] for name in ("rank/0", "rank/1")
    ]


@contextlib.contextmanager
def step_ring(pid: int, model: Path, world: int) -> Iterator[StepRing]:
    """The step ring of a running rank, found among its descriptors."""
    wiring = compose(
        Deployment(tensor_parallel_size=world),
        ModelFiles("tiny", model),
        Address(None, 0, "", None),
        daemon_pid=0,
        created=0,
    )
    layout = StepLayout(*wiring.steps[0].layout)
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(LayoutMismatch, OSError, ValueError):
            ring = StepRing.attach(os.open(path, os.O_RDWR), layout)
            yield ring
            ring.close()
            return
    raise AssertionError(f"process {pid} has no step ring of {layout}")


@pytest.mark.behaviour("F-05", "B-09")
def test_a_corrupted_step_ends_the_cell_and_the_log_names_the_field(parallel: Server, model: Path) -> None:
    expected = answer(parallel, "the", 4)
    idle(parallel)
    follower = psutil.Process(parallel.actors()["rank/1"]["pid"])
    with ThreadPoolExecutor(1) as pool, step_ring(follower.pid, model, 2) as ring:
        # While the follower stands still its leader waits for it in the middle of the next step.
        follower.suspend()
        wait_until(lambda: follower.status() == psutil.STATUS_STOPPED, what="the follower to stand still")
        asked = pool.submit(answer, parallel, "hello hello", 4)
        words, slots = ring.segment.words, ring.slots()
        done = words[ring.done_index(0)]
        wait_until(lambda: words[0] > done, what="a step that the follower has not read")
        slot = slots[done % len(slots)]
        slot.rows[COUNTER, 0] += 5
        slot.header[5] = slot_digest(done + 1, slot)
        del slot, slots
        follower.resume()
        error = asked.exception(60)
    fault = f"step {done + 1}, row 0: counter is 5 in the plan, 0 on this rank"
    assert isinstance(error, ServerError)
    assert fault in str(error)
    assert fault in revived(parallel)
    assert answer(parallel, "the", 4) == expected


def test_heads_that_do_not_divide_are_refused_before_anything_starts(folder: Path) -> None:
    nine = write_tiny_model(folder / "nine", heads=9, kv_heads=3, hidden=72)
    refused = mstar("serve", nine, "--tp", 2, "--port", 0, "--uds", folder / "s")
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert "tensor_parallel_size is 2, but num_attention_heads 9 of nine does not divide over 2 ranks" in last
    assert "rank/0" not in refused.stderr
