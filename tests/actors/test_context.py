"""How an actor waits: contexts of several actors in one process, without a supervisor."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest

from actors.context import Context
from actors.errors import AlreadyWaiting, AskFailed, ReportRefused
from actors.fabric import Fabric
from actors.frames import Answer, Ask, FromActor, FromSupervisor, Status, Stop
from actors.handover import ControlSocket, control_pair
from actors.wiring import StepSpec, Wiring
from shm.steps import StepReader, StepWriter
from tests.actors.houses import pair, toy
from tests.helpers import wait_until_async


class Room:
    """Contexts over one fabric, and the supervisor's ends of their control sockets."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.fabric = Fabric(wiring)
        self.contexts: dict[str, Context] = {}
        self.ends: dict[str, ControlSocket[FromActor]] = {}

    def enter(self, name: str) -> Context:
        spec = next(spec for spec in self.wiring.actors if spec.name == name)
        boot, _ = self.fabric.boot(spec, generation=1, path=(), loop="auto")
        own = msgspec.structs.replace(
            boot,
            board=os.dup(boot.board),
            doorbells={peer: os.dup(fd) for peer, fd in boot.doorbells.items()},
            attachments=tuple(msgspec.structs.replace(a, fd=os.dup(a.fd)) for a in boot.attachments),
        )
        ours, theirs = control_pair()
        control: ControlSocket[FromSupervisor] = ControlSocket(theirs, FromSupervisor)
        context = Context(own, control, asyncio.get_running_loop())
        context.open()
        self.contexts[name] = context
        self.ends[name] = ControlSocket(ours, FromActor)
        return context

    def close(self) -> None:
        for name, context in self.contexts.items():
            context.close()
            context._control.close()
            self.ends[name].close()
        self.fabric.close()


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    room = Room(pair())
    room.enter("caller")
    room.enter("echo")
    yield room
    room.close()


@pytest.fixture
def caller(room: Room) -> Context:
    return room.contexts["caller"]


@pytest.fixture
def echo(room: Room) -> Context:
    return room.contexts["echo"]


async def asleep(context: Context) -> None:
    await wait_until_async(lambda: context.line.epoch & 1)


def consume(context: Context, channel: str) -> None:
    reader = context.inbox[channel]
    while reader.peek() is not None:
        reader.release()


async def test_a_message_ends_the_sleep_of_its_reader_by_the_bell(caller: Context, echo: Context) -> None:
    for _ in range(20):
        task = asyncio.ensure_future(echo.wait())
        await asleep(echo)
        caller.outbox["there"].send(b"x")
        await task
        assert echo.line.epoch & 1 == 0
        consume(echo, "there")
    assert echo.statistics().rings == 20
    assert echo.statistics().sleeper.lost == 0


async def test_a_message_that_is_there_ends_the_wait_at_once(caller: Context, echo: Context) -> None:
    caller.outbox["there"].send(b"x")
    await echo.wait()
    assert echo.statistics().rings == 0
    assert echo.statistics().sleeper.announces == 0


async def test_a_spinning_reader_needs_no_bell(caller: Context, echo: Context) -> None:
    thread = threading.Timer(0.01, lambda: caller.outbox["there"].send(b"x"))
    thread.start()
    await echo.wait(spin_ns=10_000_000_000)
    thread.join()
    assert echo.statistics().sleeper.hits == 1
    assert echo.statistics().rings == 0


@pytest.mark.behaviour("F-02")
async def test_a_lost_ring_is_made_good_by_the_safety_poll_and_counted(
    caller: Context, echo: Context
) -> None:
    caller.bells["echo"]._ring = lambda: None
    for count in range(1, 4):
        task = asyncio.ensure_future(echo.wait())
        await asleep(echo)
        caller.outbox["there"].send(b"x")
        await task
        consume(echo, "there")
        assert echo.statistics().sleeper.lost == count


async def test_a_sleeper_that_nobody_needs_sleeps_on_and_counts_no_loss(echo: Context) -> None:
    task = asyncio.ensure_future(echo.wait())
    await wait_until_async(lambda: echo.statistics().sleeper.safety_polls >= 3)
    assert not task.done()
    assert echo.statistics().sleeper.lost == 0
    task.cancel()
    await asyncio.wait([task])


async def test_wake_ends_the_current_wait_or_the_next(echo: Context) -> None:
    echo.wake()
    await echo.wait()
    await wait_until_async(lambda: echo.statistics().rings == 1)
    await echo.wait()  # for nothing: the same ring, seen by the loop
    task = asyncio.ensure_future(echo.wait())
    await asleep(echo)
    thread = threading.Thread(target=echo.wake)
    thread.start()
    await task
    thread.join()


async def test_a_ring_that_comes_while_the_actor_works_is_not_forgotten(room: Room, echo: Context) -> None:
    room.contexts["caller"].bells["echo"].doorbell.ring()
    await wait_until_async(lambda: echo.statistics().rings == 1)
    await echo.wait()
    assert echo.statistics().sleeper.announces == 0


async def test_what_an_actor_watches_ends_its_wait(echo: Context) -> None:
    found: list[int] = []
    echo.watch(lambda: bool(found))
    assert not echo.has_work()
    found.append(1)
    await echo.wait()


async def test_a_cancelled_wait_leaves_the_actor_awake_and_able_to_wait(
    caller: Context, echo: Context
) -> None:
    task = asyncio.ensure_future(echo.wait())
    await asleep(echo)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert echo.line.epoch & 1 == 0
    caller.outbox["there"].send(b"x")
    await echo.wait()


async def test_only_one_task_may_wait(echo: Context) -> None:
    task = asyncio.ensure_future(echo.wait())
    await asleep(echo)
    with pytest.raises(AlreadyWaiting, match="another task waits"):
        await echo.wait()
    with pytest.raises(AlreadyWaiting):
        echo.serve(lambda: False)
    task.cancel()
    await asyncio.wait([task])
    echo.serve(lambda: False)
    with pytest.raises(AlreadyWaiting, match="a callback is served"):
        await echo.wait()


async def test_an_actor_that_always_finds_work_lets_its_loop_run(room: Room, echo: Context) -> None:
    echo.watch(lambda: True)
    room.ends["echo"].send(Stop())
    turns = 0
    while not echo.stopping:
        await echo.wait()
        turns += 1
    assert turns > 1


async def test_a_stop_order_ends_a_wait_once(room: Room, echo: Context) -> None:
    task = asyncio.ensure_future(echo.wait())
    room.ends["echo"].send(Stop())
    await task
    assert echo.stopping
    again = asyncio.ensure_future(echo.wait())  # to finish its work, an actor may wait while it stops
    await asleep(echo)
    assert not again.done()
    again.cancel()
    await asyncio.wait([again])
    await echo.until_stopping()


async def test_a_second_stop_order_ends_a_wait_too_and_shows(room: Room, echo: Context) -> None:
    room.ends["echo"].send(Stop())
    await echo.wait()
    assert (echo.stopping, echo.hastened) == (True, False)
    task = asyncio.ensure_future(echo.wait())
    await asleep(echo)
    room.ends["echo"].send(Stop())
    await task
    assert echo.hastened


async def test_a_served_callback_runs_until_it_has_no_more_and_sleeps(caller: Context, echo: Context) -> None:
    seen: list[bytes] = []

    def drain() -> bool:
        record = echo.inbox["there"].peek()
        if record is None:
            return False
        seen.append(bytes(record))
        echo.inbox["there"].release()
        return True

    echo.serve(drain)
    await asleep(echo)
    for i in range(5):
        caller.outbox["there"].send(b"%d" % i)
    await wait_until_async(lambda: len(seen) == 5)
    await asleep(echo)
    caller.outbox["there"].send(b"5")
    await wait_until_async(lambda: len(seen) == 6)
    assert seen == [b"%d" % i for i in range(6)]
    assert echo.statistics().sleeper.lost == 0


async def test_other_callbacks_run_between_the_turns_of_a_served_one(echo: Context) -> None:
    turns: list[str] = []

    def drain() -> bool:
        turns.append("drain")
        if turns.count("drain") == 3:
            echo.loop.call_soon(turns.append, "other")
        return turns.count("drain") < 10

    echo.serve(drain)
    await wait_until_async(lambda: turns.count("drain") == 10)
    assert turns.index("other") <= 4


async def test_what_a_served_callback_raises_fails_the_actor(echo: Context) -> None:
    def drain() -> bool:
        raise ValueError("no good")

    echo.serve(drain)
    with pytest.raises(ValueError, match="no good"):
        await echo.failed


async def test_a_writer_that_was_refused_is_woken_when_there_is_room(caller: Context, echo: Context) -> None:
    while caller.outbox["there"].send(bytes(4000)):
        pass
    task = asyncio.ensure_future(caller.wait())
    await asleep(caller)
    assert not task.done()
    consume(echo, "there")
    await task
    assert caller.outbox["there"].send(bytes(4000))
    assert caller.statistics().sleeper.lost == 0


@pytest.mark.behaviour("F-18")
async def test_a_control_message_passes_when_the_ring_is_full_of_data(caller: Context, echo: Context) -> None:
    ring = caller.outbox["there"]
    while ring.send(b"data"):
        pass
    assert ring.send(b"abort", control=True)
    last = b""
    reader = echo.inbox["there"]
    while (record := reader.peek()) is not None:
        last = bytes(record)
        reader.release()
    assert last == b"abort"


async def test_questions_are_answered_by_number_and_errors_are_raised(room: Room, echo: Context) -> None:
    end = room.ends["echo"]

    def answer(frame: FromActor, descriptors: list[int]) -> None:
        if isinstance(frame, Ask) and frame.kind == "good":
            end.send(Answer(frame.id, frame.payload[::-1], ""))
        elif isinstance(frame, Ask) and frame.kind == "bad":
            end.send(Answer(frame.id, b"", "no such thing"))

    end.attach(asyncio.get_running_loop(), answer, lambda: None)
    assert await asyncio.gather(*(echo.ask("good", b"%d." % i) for i in range(64))) == [
        (b"%d." % i)[::-1] for i in range(64)
    ]
    with pytest.raises(AskFailed, match="no such thing"):
        await echo.ask("bad")
    with pytest.raises(AskFailed, match=r"did not answer 'silence' within 0\.01 s"):
        await echo.ask("silence", timeout=0.01)


async def test_questions_and_kinds_of_status_are_bounded(echo: Context) -> None:
    tasks = [asyncio.ensure_future(echo.ask("silence")) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(AskFailed, match="64 questions to the supervisor are open"):
        await echo.ask("one more")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for i in range(32):
        echo.report(f"kind{i}", b"")
        echo.report(f"kind{i}", b"")
    with pytest.raises(ReportRefused, match="'one more' would be the kind of status 33"):
        echo.report("one more", b"")


async def test_reports_reach_the_supervisor_from_any_thread(room: Room, echo: Context) -> None:
    thread = threading.Thread(target=echo.report, args=("kind", b"payload"))
    thread.start()
    thread.join()
    assert room.ends["echo"].receive() == (Status("kind", b"payload"), [])


async def test_the_leader_of_a_step_ring_wakes_when_a_reader_is_done() -> None:
    room = Room(
        Wiring(
            actors=(toy("leader", "Echo", cell="c"), toy("reader", "Echo", cell="c")),
            steps=(StepSpec("steps", "leader", ("reader",), (4, 4, 64, 4, 1)),),
        )
    )
    leader, reader = room.enter("leader"), room.enter("reader")
    writer, steps = leader.steps["steps"], reader.steps["steps"]
    assert isinstance(writer, StepWriter)
    assert isinstance(steps, StepReader)
    for seq in range(1, 6):
        follow = asyncio.ensure_future(reader.wait())
        await asleep(reader)
        writer.begin(seq)
        writer.commit(seq)
        await follow
        lead = asyncio.ensure_future(leader.wait())
        if seq % 2:
            await asleep(leader)
        steps.done()  # where the leader does not sleep yet, it is not rung, and must see it all the same
        await lead
        assert writer.done(0) == seq
    assert leader.statistics().sleeper.lost == 0
    room.close()
