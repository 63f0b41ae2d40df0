"""The control socket: frames, descriptors, and bounds."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from actors.errors import ControlClosed, ControlCongested, FrameTooLarge
from actors.frames import Answer, Ask, FromActor, FromSupervisor, Ready, Stage, Status, Stop
from actors.handover import MAX_FRAME, ControlSocket, control_pair
from tests.helpers import wait_until_async

Ends = tuple[ControlSocket[FromActor], ControlSocket[FromSupervisor]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The supervisor's end and the actor's."""
    left, right = control_pair()
    pair: Ends = (ControlSocket(left, FromActor, bound=8), ControlSocket(right, FromSupervisor, bound=8))
    yield pair
    for end in pair:
        end.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_frames_arrive_one_by_one_and_in_order(ends: Ends) -> None:
    ours, theirs = ends
    for frame in (Stage("loading", 1, 2), Ready()):
        theirs.send(frame)
    assert [ours.receive(), ours.receive(), ours.receive()] == [
        (Stage("loading", 1, 2), []),
        (Ready(), []),
        None,
    ]


def test_descriptors_travel_with_a_frame_and_do_not_leak_into_children(ends: Ends) -> None:
    ours, theirs = ends
    read, write = os.pipe()
    ours.send(Stop(), [write])
    os.close(write)
    received = theirs.receive()
    assert received is not None
    frame, (copy,) = received
    assert frame == Stop()
    assert not os.get_inheritable(copy)
    os.write(copy, b"x")
    os.close(copy)
    assert os.read(read, 2) == b"x"
    os.close(read)


def test_the_end_of_the_other_side_is_an_error_that_comes_after_its_frames(ends: Ends) -> None:
    ours, theirs = ends
    theirs.send(Ready())
    theirs.close()
    assert ours.receive() == (Ready(), [])
    with pytest.raises(ControlClosed):
        ours.receive()
    ours.send(Stop())  # to somebody who is gone: dropped
    assert ours.closed


def test_a_frame_that_fits_no_datagram_is_refused_with_its_size(ends: Ends) -> None:
    with pytest.raises(FrameTooLarge, match=rf"Status of \d+ bytes exceeds {MAX_FRAME}"):
        ends[1].send(Status("big", bytes(MAX_FRAME)))


def test_the_largest_frame_passes(ends: Ends) -> None:
    ours, theirs = ends
    payload = os.urandom(MAX_FRAME - 64)
    theirs.send(Ask(1, "k", payload))
    received = ours.receive()
    assert received is not None
    assert received[0] == Ask(1, "k", payload)


async def test_what_the_kernel_does_not_take_waits_up_to_the_bound_and_leaves_in_order(ends: Ends) -> None:
    ours, theirs = ends
    sent = 0
    while ours.statistics().waiting < 8:
        ours.send(Answer(sent, bytes(60000), ""))
        sent += 1
    with pytest.raises(ControlCongested, match="8 control frames wait"):
        ours.send(Answer(sent, b"", ""))
    got: list[int] = []
    ours.attach(asyncio.get_running_loop(), lambda frame, fds: None, lambda: None)
    theirs.attach(asyncio.get_running_loop(), lambda frame, fds: got.append(frame.id), lambda: None)  # type: ignore[union-attr]
    await wait_until_async(lambda: len(got) == sent)
    assert got == list(range(sent))
    ours.send(Answer(sent, b"", ""))
    await wait_until_async(lambda: got[-1] == sent)


async def test_descriptors_of_a_waiting_frame_are_kept_open_and_then_closed(ends: Ends) -> None:
    ours, theirs = ends
    while ours.statistics().waiting == 0:
        ours.send(Answer(0, bytes(60000), ""))
    before = descriptors()
    read, write = os.pipe()
    ours.send(Stop(), [write])
    os.close(write)
    got: list[int] = []
    loop = asyncio.get_running_loop()
    ours.attach(loop, lambda frame, fds: None, lambda: None)
    theirs.attach(loop, lambda frame, fds: got.extend(fds), lambda: None)
    await wait_until_async(lambda: got)
    os.write(got[0], b"x")
    assert os.read(read, 1) == b"x"
    os.close(got[0])
    os.close(read)
    assert descriptors() <= before


def test_descriptors_of_frames_that_never_left_are_closed(ends: Ends) -> None:
    ours, _ = ends
    while ours.statistics().waiting == 0:
        ours.send(Answer(0, bytes(60000), ""))
    before = descriptors()
    ours.send(Stop(), [0, 1])
    assert descriptors() == before + 2
    ours.close()
    assert descriptors() == before - 1


async def test_of_status_only_the_latest_per_kind_waits(ends: Ends) -> None:
    ours, theirs = ends
    number = 0
    while theirs.statistics().superseded < 100:
        number += 1
        theirs.post("a", Status("a", str(number).encode().rjust(9000)))
    theirs.post("b", Status("b", b"only"))
    assert theirs.statistics().waiting == 2
    got: dict[str, bytes] = {}
    loop = asyncio.get_running_loop()
    theirs.attach(loop, lambda frame, fds: None, lambda: None)
    ours.attach(loop, lambda frame, fds: got.update({frame.kind: frame.payload}), lambda: None)  # type: ignore[union-attr]
    await wait_until_async(lambda: "b" in got)
    assert int(got["a"]) == number


async def test_another_thread_may_send_while_the_loop_is_blocked_up(ends: Ends) -> None:
    ours, theirs = ends
    loop = asyncio.get_running_loop()
    theirs.attach(loop, lambda frame, fds: None, lambda: None)

    def fill() -> None:
        for number in range(1000):
            theirs.post("a", Status("a", str(number).encode().rjust(9000)))

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    assert theirs.statistics().waiting == 1
    got: list[int] = []
    ours.attach(loop, lambda frame, fds: got.append(int(frame.payload)), lambda: None)  # type: ignore[union-attr]
    await wait_until_async(lambda: got and got[-1] == 999)


def test_last_words_are_sent_without_a_loop(ends: Ends) -> None:
    ours, theirs = ends
    theirs.post("a", Status("a", b"x"))
    theirs.send_last(Ready(), 1.0)
    assert ours.receive() == (Status("a", b"x"), [])
    assert ours.receive() == (Ready(), [])
