"""Starting and stopping: stages, causes of failed starts, questions, the order of a stop."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from actors.errors import NotMainThread, StartFailed
from actors.events import ActorEnded, ActorReady, ActorSpawned, CellStarted, StageEnded, StageReport
from actors.wiring import Wiring
from shm.errors import NoSharedMemory
from tests.actors.houses import House, alive, pair, running, tell, toy
from tests.helpers import wait_until_async


def alone(kind: str, config: bytes = b"", **more: object) -> Wiring:
    return Wiring(actors=(toy("rank0", kind, config=config),), **more)  # type: ignore[arg-type]


def left_by_the_dead() -> str:
    """A name in /dev/shm as a process leaves it that is killed between creating and unlinking."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    name = f"mstar-{os.getuid()}-{child.pid}-1-0123456789abcdef"
    Path("/dev/shm", name).touch()
    return name


async def failing(wiring: Wiring) -> StartFailed:
    """The error of a start that must fail, after which no process may be left."""
    house = House(wiring)
    with pytest.raises(StartFailed) as caught:
        await house.supervisor.start()
    spawned = [event.pid for event in house.of(ActorSpawned)]
    assert spawned
    assert not any(alive(pid)() for pid in spawned)
    return caught.value


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("caller", ["Caller", "ServedCaller"])
async def test_two_actors_exchange_messages(caller: str, loop: str) -> None:
    async with running(House(pair(caller), loop=loop)) as house:
        await wait_until_async(lambda: house.echoed()[0] > 100)
        assert house.echoed()[1] == house.pid("echo")
        assert house.report("caller", "events") == "ready echo of echos in generation 1"
    assert house.supervisor.statistics().actors["echo"].state == "waiting"


@pytest.mark.behaviour("F-10")
async def test_stages_are_named_counted_and_timed() -> None:
    async with running(House(alone("Staged"))) as house:
        reported = [(e.stage, e.done, e.total) for e in house.of(StageReport)]
        assert reported == [
            ("importing", 0, 0),
            ("setting up", 0, 0),
            *(("loading", i, 3) for i in range(4)),
            ("capturing", 0, 0),
        ]
        ended = house.of(StageEnded)
        assert [e.stage for e in ended] == ["starting", "importing", "setting up", "loading", "capturing"]
        (ready,) = house.of(ActorReady)
        assert sum(e.seconds for e in ended) == pytest.approx(ready.seconds, abs=0.01)
        assert house.of(CellStarted)[0].generation == 1


async def test_statistics_show_every_actor() -> None:
    async with running(House(pair())) as house:
        await wait_until_async(lambda: house.supervisor.statistics().actors["echo"].step > 10)
        found = house.supervisor.statistics()
        echo = found.actors["echo"]
        assert (echo.state, echo.cell, echo.generation, echo.restarts) == ("ready", "echos", 1, 0)
        assert echo.beat_age is not None
        assert echo.beat_age < 5
        assert alive(echo.pid)()
        assert found.cells == {"callers": "ready", "echos": "ready"}
        assert found.fabric.objects == 2
    assert house.supervisor.statistics().cells == {"callers": "ended", "echos": "ended"}


@pytest.mark.behaviour("F-01")
@pytest.mark.parametrize(("toy_name", "stage"), [("Stuck", "loading 3/12"), ("Spinning", "holding the loop")])
async def test_a_stage_without_progress_fails_the_start_naming_actor_stage_and_age(
    toy_name: str, stage: str
) -> None:
    skew = 0.0
    house = House(alone(toy_name, stage_timeout=300.0), clock=lambda: time.monotonic() + skew)
    starting = asyncio.ensure_future(house.supervisor.start())
    await wait_until_async(lambda: house.supervisor.statistics().actors["rank0"].stage == stage, 10.0)
    assert not starting.done()
    skew = 310.0
    with pytest.raises(StartFailed) as caught:
        await starting
    assert re.fullmatch(
        rf'actor rank0 \(pid \d+\) in stage "{stage}" made no progress for 3[12]\d\.\d s '
        r"\(stage_timeout is 300 s\)",
        str(caught.value),
    )
    assert not any(alive(event.pid)() for event in house.of(ActorSpawned))


@pytest.mark.behaviour("F-10")
@pytest.mark.parametrize(
    ("target", "config", "cause"),
    [
        ("tests.actors.broken:Broken", b"", 'in stage "importing" failed during import: ImportError: broken'),
        ("tests.actors.toys:Missing", b"", "during import: AttributeError: module 'tests.actors.toys'"),
        ("tests.actors.toys:Ping", b"", "must be a subclass of actors.actor.Actor"),
        ("tests.actors.toys:Failing", b"init", "failed during import: ValueError: broken in __init__"),
        ("tests.actors.toys:Failing", b"setup", '"loading 3/12" failed during setup: ValueError: broken'),
        ("tests.actors.toys:Failing", b"signal", 'in stage "setting up" was killed by SIGSEGV'),
        ("tests.actors.toys:Failing", b"exit", 'in stage "setting up" exited with code 3'),
    ],
)
async def test_the_last_line_of_a_failed_start_is_the_cause(target: str, config: bytes, cause: str) -> None:
    spec = msgspec.structs.replace(toy("rank0", "Failing", config=config), target=target)
    error = await failing(Wiring(actors=(spec,)))
    last = str(error).splitlines()[-1]
    assert last == error.cause
    assert last.startswith("actor rank0 (pid ")
    assert cause in last
    if "Error: " in cause:
        assert "Traceback (most recent call last)" in error.traceback
        assert str(error).startswith(error.traceback.rstrip())


@pytest.mark.behaviour("F-10")
async def test_an_actor_killed_while_it_starts_fails_the_start_with_the_signal() -> None:
    house = House(alone("Stuck"))
    starting = asyncio.ensure_future(house.supervisor.start())
    await wait_until_async(lambda: house.pid("rank0"))
    os.kill(house.pid("rank0"), signal.SIGKILL)
    with pytest.raises(StartFailed, match=r"actor rank0 \(pid \d+\) in stage .* was killed by SIGKILL$"):
        await starting


async def test_a_failed_start_takes_the_other_actors_along() -> None:
    wiring = pair(echo="Failing")
    broken = msgspec.structs.replace(wiring.actors[1], config=b"setup")
    error = await failing(msgspec.structs.replace(wiring, actors=(wiring.actors[0], broken)))
    assert error.actor == "echo"


async def test_a_cancelled_start_leaves_nothing_behind() -> None:
    house = House(alone("Stuck"))
    starting = asyncio.ensure_future(house.supervisor.start())
    await wait_until_async(lambda: any(e.stage == "loading" for e in house.of(StageReport)))
    pid = house.pid("rank0")
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert not alive(pid)()


async def test_a_stop_during_the_start_ends_it_in_order() -> None:
    house = House(alone("Stuck"))
    starting = asyncio.ensure_future(house.supervisor.start())
    await wait_until_async(lambda: any(e.stage == "loading" for e in house.of(StageReport)))
    await house.supervisor.stop(10.0)
    with pytest.raises(StartFailed, match="the start was stopped"):
        await starting
    (ended,) = house.of(ActorEnded)
    assert "SIGKILL" not in ended.cause


def test_actors_are_started_by_the_main_thread_only() -> None:
    errors: list[BaseException] = []

    def start() -> None:
        try:
            asyncio.run(House(alone("Staged")).supervisor.start())
        except NotMainThread as error:
            errors.append(error)

    thread = threading.Thread(target=start, name="helper")
    thread.start()
    thread.join()
    assert "in the thread 'helper'" in str(errors[0])


@pytest.mark.behaviour("F-11")
async def test_memory_that_does_not_fit_fails_the_start_before_a_process_runs() -> None:
    wiring = pair()
    big = msgspec.structs.replace(wiring.channels[0], capacity=1 << 50)
    house = House(msgspec.structs.replace(wiring, channels=(wiring.channels[1], big)))
    with pytest.raises(NoSharedMemory, match="docker: --shm-size"):
        await house.supervisor.start()
    assert house.of(ActorSpawned) == []


async def test_questions_are_answered_by_the_composition_root() -> None:
    async with running(House(alone("Asking"))) as house:
        await wait_until_async(lambda: house.report("rank0", "answers"))
        assert house.report("rank0", "answers") == "42 LookupError: rank0 asked for refuse"


async def test_an_inherited_descriptor_is_usable_and_stops_its_actor_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        front = msgspec.structs.replace(toy("front", "Front"), fds={"tcp": server.fileno()})
        house = House(Wiring(actors=(toy("rank0", "Staged"), front)))
        async with running(house):
            reader, writer = await asyncio.open_connection(*server.getsockname())
            assert await reader.read() == b"hello"
            writer.close()
            await writer.wait_closed()
        assert [e.actor for e in house.of(ActorEnded)] == ["front", "rank0"]


async def test_a_stubborn_actor_is_killed_after_the_grace() -> None:
    house = House(alone("Stubborn"))
    async with running(house, grace=0.2):
        pass
    (ended,) = house.of(ActorEnded)
    assert ended.cause.endswith("was killed by SIGKILL")


async def test_a_second_stop_hastens_the_first() -> None:
    house = House(alone("Stubborn"))
    async with running(house):
        first = asyncio.ensure_future(house.supervisor.stop(3600.0))
        await asyncio.sleep(0)
        await house.supervisor.stop(0.0)
        await first
    assert house.of(ActorEnded)[0].cause.endswith("was killed by SIGKILL")


async def test_signals_to_the_process_group_do_not_reach_actors() -> None:
    house = House(pair())
    async with running(house):
        for actor in ("caller", "echo"):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(house.pid(actor), number)
        count, _ = house.echoed()
        await wait_until_async(lambda: house.echoed()[0] > count + 100)
    assert [e.generation for e in house.of(ActorSpawned)] == [1, 1]


async def test_signals_to_an_actor_that_has_only_just_been_spawned_do_not_reach_it_either() -> None:
    house = House(alone("Staged"))
    house.also = lambda event: os.kill(event.pid, signal.SIGTERM) if isinstance(event, ActorSpawned) else None
    async with running(house):
        assert len(house.of(ActorReady)) == 1


async def test_peers_that_are_ready_before_an_actor_are_told_to_it_after_its_setup() -> None:
    house = House(pair("Late"))
    starting = asyncio.ensure_future(house.supervisor.start())
    await wait_until_async(lambda: house.of(ActorReady), 10.0)
    assert house.of(ActorReady)[0].actor == "echo"
    assert house.report("caller", "events") == ""
    await tell(house, "caller")
    await starting
    await wait_until_async(lambda: house.echoed()[0] > 20)
    assert house.report("caller", "events") == "ready echo of echos in generation 1"
    await house.supervisor.stop(5.0)


@pytest.mark.behaviour("F-07")
async def test_a_start_sweeps_the_names_of_a_daemon_that_was_killed_at_the_wrong_moment() -> None:
    name = left_by_the_dead()
    async with running(House(alone("Staged"))):
        assert name not in os.listdir("/dev/shm")


async def test_the_environment_of_an_actor_is_its_own() -> None:
    spec = msgspec.structs.replace(toy("rank0", "Settings"), env={"TOY": "yes"}, fds={"none": os.dup(0)})
    async with running(House(Wiring(actors=(spec,)))) as house:
        os.close(spec.fds["none"])
        await wait_until_async(lambda: house.report("rank0", "settings"))
        settings = dict(line.split("=") for line in house.report("rank0", "settings").splitlines())
        assert settings == {
            "TOY": "yes",
            "switch": "50 us",
            "frozen": "True",
            "inherited": "0,1,2",
        }
    assert "TOY" not in os.environ
