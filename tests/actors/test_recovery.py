"""Deaths while serving: the peers hear of it, the cell comes back with new memory, messages flow again."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest

from actors import pace
from actors.errors import CellGivenUp
from actors.events import ActorEnded, ActorSpawned, CellDied, CellRestarting, CellStarted
from actors.restarts import RestartPolicy
from actors.wiring import ChannelSpec, SlabSpec, StepSpec, Wiring
from tests.actors.houses import House, alive, pair, running, tell, toy
from tests.helpers import wait_until, wait_until_async


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def started(house: House, actor: str, generation: int) -> bool:
    found = house.supervisor.statistics().actors[actor]
    return (found.state, found.generation) == ("ready", generation)


async def flowing(house: House, *, more: int = 20) -> None:
    """Wait until more pings come back, from the echo that lives now."""
    start, _ = house.echoed()
    await wait_until_async(
        lambda: house.echoed()[0] > start + more and house.echoed()[1] == house.pid("echo") != 0,
        10.0,
        what="pings to come back",
    )


async def restarted(house: House, actor: str, pid: int) -> None:
    await wait_until_async(
        lambda: (
            house.pid(actor) not in (0, pid) and house.supervisor.statistics().actors[actor].state == "ready"
        ),
        10.0,
        what=f"{actor} to be restarted",
    )


async def test_a_killed_actor_comes_back_with_new_rings() -> None:
    async with running(House(pair())) as house:
        await flowing(house)
        caller, echo = house.pid("caller"), house.pid("echo")
        os.kill(echo, signal.SIGKILL)
        await restarted(house, "echo", echo)
        await flowing(house)
        assert house.pid("caller") == caller
        events = house.report("caller", "events").splitlines()
        assert events[0] == "ready echo of echos in generation 1"
        assert events[1].startswith(f"lost echo of echos: actor echo (pid {echo})")
        assert events[1].endswith("was killed by SIGKILL")
        assert events[2] == "ready echo of echos in generation 2"
        assert house.supervisor.statistics().actors["echo"].restarts == 1
        assert house.supervisor.statistics().fabric.replaced == 2
    assert [e.actor for e in house.of(CellDied)] == ["echo"]
    assert house.of(ActorEnded)[0].cause.endswith("was killed by SIGKILL")


@pytest.mark.parametrize("caller", ["Caller", "ServedCaller"])
async def test_repeated_restarts_of_either_side_leak_no_descriptor(caller: str) -> None:
    async with running(House(pair(caller))) as house:
        await flowing(house)
        ours, theirs = descriptors(os.getpid()), descriptors(house.pid("caller"))
        for _ in range(3):
            pid = house.pid("echo")
            os.kill(pid, signal.SIGKILL)
            await restarted(house, "echo", pid)
            await flowing(house)
        assert descriptors(os.getpid()) == ours
        assert descriptors(house.pid("caller")) == theirs
        pid = house.pid("caller")
        os.kill(pid, signal.SIGKILL)
        await restarted(house, "caller", pid)
        await flowing(house)
        assert descriptors(os.getpid()) == ours
        assert descriptors(house.pid("caller")) == theirs


async def test_the_front_actor_comes_back_too_and_is_told_of_peers_that_are_ready() -> None:
    async with running(House(pair("ServedCaller"))) as house:
        await flowing(house)
        pid, echo = house.pid("caller"), house.pid("echo")
        os.kill(pid, signal.SIGKILL)
        await restarted(house, "caller", pid)
        await flowing(house)
        assert house.pid("echo") == echo
        assert house.report("caller", "events") == "ready echo of echos in generation 1"


async def test_both_sides_dying_at_once_come_back_and_find_each_other() -> None:
    async with running(House(pair())) as house:
        for _ in range(2):
            await flowing(house)
            caller, echo = house.pid("caller"), house.pid("echo")
            os.kill(echo, signal.SIGKILL)
            os.kill(caller, signal.SIGKILL)
            await restarted(house, "caller", caller)
            await restarted(house, "echo", echo)
        await flowing(house)


async def test_a_death_during_the_restart_is_one_more_restart() -> None:
    async with running(House(pair())) as house:
        await flowing(house)
        first = house.pid("echo")
        os.kill(first, signal.SIGKILL)
        await wait_until_async(lambda: house.pid("echo") not in (0, first), 10.0)
        second = house.pid("echo")
        os.kill(second, signal.SIGKILL)  # while it imports
        await restarted(house, "echo", second)
        await flowing(house)
        assert house.supervisor.statistics().actors["echo"].generation >= 3


async def test_a_death_during_the_hand_over_is_survived() -> None:
    house = House(pair())
    victims: list[int] = []

    def on_event(event: object) -> None:
        # The hand-over to the caller begins in the same callback, right after this event.
        if isinstance(event, CellStarted) and event.cell == "echos" and event.generation == 2:
            for actor in ("caller", "echo"):
                victims.append(house.pid(actor))
                os.kill(victims[-1], signal.SIGKILL)

    house.also = on_event
    async with running(house):
        await flowing(house)
        os.kill(house.pid("echo"), signal.SIGKILL)
        await wait_until_async(lambda: len(victims) == 2, 10.0)
        await restarted(house, "caller", victims[0])
        await restarted(house, "echo", victims[1])
        await flowing(house)


async def test_a_frozen_peer_takes_the_hand_over_when_it_thaws() -> None:
    async with running(House(pair())) as house:
        await flowing(house)
        caller, echo = house.pid("caller"), house.pid("echo")
        os.kill(caller, signal.SIGSTOP)
        for _ in range(2):
            os.kill(echo, signal.SIGKILL)
            await restarted(house, "echo", echo)
            echo = house.pid("echo")
        os.kill(caller, signal.SIGCONT)
        await flowing(house)
        assert house.pid("caller") == caller
        states = [line.split(":")[0] for line in house.report("caller", "events").splitlines()]
        assert states == [
            "ready echo of echos in generation 1",
            "lost echo of echos",
            "ready echo of echos in generation 2",
            "lost echo of echos",
            "ready echo of echos in generation 3",
        ]


async def test_the_cause_of_a_death_is_the_traceback_of_the_actor() -> None:
    async with running(House(pair(echo="Fragile"))) as house:
        await tell(house, "echo")
        await wait_until_async(lambda: house.of(CellRestarting), 10.0)
        (died,) = house.of(CellDied)[:1]
        assert 'in stage "running" failed during run: RuntimeError: a signal was too much' in died.reason


async def test_an_actor_that_ends_unasked_is_dead() -> None:
    async with running(House(Wiring(actors=(toy("rank0", "Brief"),)))) as house:
        await tell(house, "rank0")
        await wait_until_async(lambda: house.of(CellRestarting), 10.0)
        assert "ended by itself: its run() returned" in house.of(CellRestarting)[0].cause


async def test_a_cell_that_dies_too_often_is_given_up_with_the_cause() -> None:
    policy = RestartPolicy(limit=2, delay=0.0, longest=0.0, settled=60.0)
    house = House(Wiring(actors=(toy("rank0", "Brief"), toy("other", "Staged"))), policy=policy)
    await house.supervisor.start()
    serving = asyncio.ensure_future(house.supervisor.serve())
    for generation in (1, 2, 3):
        await wait_until_async(lambda number=generation: started(house, "rank0", number), 10.0)  # type: ignore[misc]
        await tell(house, "rank0")
    with pytest.raises(CellGivenUp) as caught:
        await serving
    assert "cell 'rank0s' is given up after 3 deaths in a row" in str(caught.value)
    assert "ended by itself" in caught.value.cause
    assert house.supervisor.statistics().actors["other"].state == "ready"
    await house.supervisor.stop(5.0)
    assert [e.attempt for e in house.of(CellRestarting)] == [1, 2]


async def test_a_cell_dies_as_a_whole_and_everything_it_touched_is_replaced() -> None:
    wiring = Wiring(
        actors=(
            toy("front", "Sharing"),
            toy("rank0", "Sharing", cell="ranks"),
            toy("rank1", "Sharing", cell="ranks"),
            toy("bystander", "Sharing"),
        ),
        channels=(
            ChannelSpec("in", "front", "rank0", 4096),
            ChannelSpec("out", "rank0", "front", 4096),
            ChannelSpec("aside", "front", "bystander", 4096),
        ),
        slabs=(SlabSpec("prompts", "front", ("rank0", "rank1"), ((4096, 2),)),),
        steps=(StepSpec("steps", "rank0", ("rank1",), (4, 4, 64, 4, 1)),),
    )
    async with running(House(wiring)) as house:
        before = {name: house.pid(name) for name in ("front", "rank0", "rank1", "bystander")}
        os.kill(before["rank1"], signal.SIGKILL)
        await wait_until_async(lambda: house.report("front", "events").count("ready rank1") == 2, 10.0)
        await wait_until_async(lambda: house.report("rank0", "events").count("ready rank1") == 1, 10.0)
        assert house.pid("front") == before["front"]
        assert house.pid("bystander") == before["bystander"]
        assert house.pid("rank0") != before["rank0"]
        assert not alive(before["rank0"])()
        assert house.report("front", "generations") == "in=2 out=2 aside=1 prompts=2"
        assert house.report("front", "poisoned at the loss") == "in out prompts"
        assert house.report("rank0", "generations") == "in=2 out=2 prompts=2 steps=2"
        assert house.report("bystander", "events").split() == [
            "ready",
            "front",
            "of",
            "fronts",
            "in",
            "generation",
            "1",
        ]
        lost = [e for e in house.report("front", "events").splitlines() if e.startswith("lost")]
        assert [line.split()[1] for line in lost] == ["rank0", "rank1"]
        assert all(f"actor rank1 (pid {before['rank1']})" in line for line in lost)
    assert [e.actor for e in house.of(CellDied)] == ["rank1"]


async def test_the_cause_is_the_mate_that_was_killed_not_the_one_that_failed_over_it() -> None:
    wiring = Wiring(
        actors=(toy("rank0", "Mourner", cell="ranks"), toy("rank1", "Echo", cell="ranks")),
        channels=(
            ChannelSpec("there", "rank0", "rank1", 4096),
            ChannelSpec("back", "rank1", "rank0", 4096),
        ),
    )
    async with running(House(wiring)) as house:
        await wait_until_async(lambda: house.report("rank0", "watching"))
        os.kill(house.pid("rank1"), signal.SIGKILL)
        # Hold the supervisor up until both are dead: what it hears first then is the complaint.
        wait_until(lambda: not alive(house.pid("rank0"))() and not alive(house.pid("rank1"))())
        await wait_until_async(lambda: house.of(CellDied), 10.0)
        (died,) = house.of(CellDied)
        assert died.actor == "rank1"
        assert died.reason.endswith("was killed by SIGKILL")


async def test_a_death_in_an_idle_house_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(House(pair(config=b"1"))) as house:
        await wait_until_async(lambda: house.echoed()[0] == 1)
        monkeypatch.setattr(pace, "IDLE", 3600.0)
        monkeypatch.setattr(pace, "_SETTLED", 0.0)
        looks: list[None] = []
        monkeypatch.setattr(
            house.supervisor, "_tick", lambda tick=house.supervisor._tick: looks.append(tick())
        )
        await quiet(house, looks)
        os.kill(house.pid("echo"), signal.SIGKILL)
        await wait_until_async(lambda: house.of(CellDied))


async def quiet(house: House, looks: list[None]) -> None:
    """Wait until the supervisor has stopped looking."""
    before = -1
    while len(looks) != before:
        before = len(looks)
        until = house.supervisor._clock() + 0.15
        await wait_until_async(lambda until=until: house.supervisor._clock() > until)  # type: ignore[misc]


async def test_what_the_dead_had_finished_writing_can_be_drained() -> None:
    wiring = pair(caller="Collector", echo="Burst")
    async with running(House(wiring, policy=RestartPolicy(delay=3600.0, longest=3600.0))) as house:
        await tell(house, "echo")
        await wait_until_async(lambda: house.report("caller", "collected"), 10.0)
        assert house.report("caller", "collected") == "100 messages after the loss"


async def test_a_peer_that_does_not_listen_is_killed_rather_than_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(House(pair())) as house:
        await flowing(house)
        caller = house.pid("caller")
        os.kill(caller, signal.SIGSTOP)
        process = house.supervisor._cell_of["caller"].processes["caller"]
        process.control._bound = 0
        monkeypatch.setattr(process.control, "_transmit", lambda data, descriptors: False)
        os.kill(house.pid("echo"), signal.SIGKILL)
        await restarted(house, "caller", caller)
        await flowing(house)
        assert any("does not listen to its supervisor" in e.reason for e in house.of(CellDied))


async def test_deaths_during_a_stop_are_not_restarted() -> None:
    wiring = pair(caller="Stubborn")
    front = msgspec.structs.replace(wiring.actors[0], stop_phase=0)
    house = House(msgspec.structs.replace(wiring, actors=(front, wiring.actors[1])))
    async with running(house, grace=0.3):
        house.supervisor._stopping = True
        os.kill(house.pid("echo"), signal.SIGKILL)
    assert len(house.of(ActorSpawned)) == 2
