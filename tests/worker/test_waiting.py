"""The waiting line: order, age, and what it refuses."""

from __future__ import annotations

import msgspec
import numpy as np

from mstar.messages.request import Admit, Sampling
from mstar.messages.step import Bind, Input, StepTail
from mstar.worker.limits import Limits
from mstar.worker.waiting import Waiting, WaitingLine, bind_bytes
from shm.slab import SlabHandle

LIMITS = Limits(
    slots=4,
    max_seq_len=64,
    pages=16,
    page_size=4,
    batch_tokens=32,
    min_chunk_tokens=4,
    depth=1,
    max_waiting=3,
)
MOST = 2**63 - 1
MOST_32 = 2**31 - 1


def admit(request: int, prompt: int = 3, max_tokens: int = 4) -> Admit:
    """An admission of ``prompt`` tokens."""
    return Admit(request, 0, SlabHandle(0, 0, 4 * prompt), prompt, max_tokens, Sampling())


def join(line: WaitingLine, request: int, given_back: list[int]) -> tuple[int, str] | None:
    return line.join(admit(request), np.zeros(3, np.int32), b"", lambda: given_back.append(request))


def heads(line: WaitingLine) -> list[int]:
    """Everyone in the order of their turns."""
    found = []
    while (head := line.head()) is not None:
        found.append(head.message.request)
        line.advance()
    return found


def test_first_come_first_served() -> None:
    line = WaitingLine(LIMITS)
    for request in (5, 3, 9):
        join(line, request, [])
    assert heads(line) == [5, 3, 9]


def test_preempted_sequences_come_first_and_by_age() -> None:
    line = WaitingLine(LIMITS)
    for request in (10, 20, 30):
        join(line, request, [])
    assert heads(line) == [10, 20, 30]
    join(line, 5, [])
    for order in (3, 1, 2):
        line.rejoin(Waiting(order, admit(10 * order), np.zeros(5, np.int32), b"", 2, None))
    assert heads(line) == [10, 20, 30, 5]


def aside(given_back: list[int]) -> WaitingLine:
    """Request 1, its choices 2 and 3 that wait for its prompt, and request 4."""
    line = WaitingLine(LIMITS._replace(max_waiting=8))
    join(line, 1, given_back)
    for request in (2, 3):
        line.join(
            admit(request),
            np.zeros(3, np.int32),
            b"",
            lambda request=request: given_back.append(request),  # type: ignore[misc]
            first=1,
        )
    join(line, 4, given_back)
    return line


def test_choices_stand_aside_until_the_prompt_has_run_and_keep_their_age() -> None:
    line = aside([])
    assert len(line) == 4
    assert heads(line) == [1, 4]
    join(line, 5, [])
    line.call(1)
    assert heads(line) == [2, 3, 5]
    assert not len(line)


def test_when_the_first_choice_leaves_the_next_one_runs_the_prompt() -> None:
    given_back: list[int] = []
    line = aside(given_back)
    assert line.remove(1)
    assert heads(line) == [2, 4]
    line.succeed(2)
    assert heads(line) == [3]
    assert given_back == [1]


def test_a_choice_that_stands_aside_can_leave() -> None:
    given_back: list[int] = []
    line = aside(given_back)
    assert line.remove(2)
    assert not line.remove(2)
    assert sorted(line.requests()) == [1, 3, 4]
    line.call(1)
    assert heads(line) == [1, 3, 4]
    assert given_back == [2]


def test_who_leaves_the_line_gives_the_input_back_once() -> None:
    line = WaitingLine(LIMITS)
    given_back: list[int] = []
    for request in (1, 2, 3):
        join(line, request, given_back)
    assert line.remove(2)
    assert not line.remove(2)
    assert given_back == [2]
    assert heads(line) == [1, 3]


def test_a_preempted_sequence_can_leave_too() -> None:
    line = WaitingLine(LIMITS)
    line.rejoin(Waiting(1, admit(7), np.zeros(5, np.int32), b"", 2, None))
    assert line.requests() == [7]
    assert line.remove(7)
    assert not len(line)


def test_a_full_line_refuses_with_429_and_takes_again_after_a_turn() -> None:
    line = WaitingLine(LIMITS)
    assert [join(line, request, []) for request in (1, 2, 3)] == [None] * 3
    refused = join(line, 4, [])
    assert refused is not None
    assert refused[0] == 429
    line.advance()
    assert join(line, 4, []) is None


def test_a_sequence_for_which_no_pages_could_ever_do_is_refused_by_their_number() -> None:
    line = WaitingLine(LIMITS._replace(pages=2))
    refused = line.join(admit(1, 3, 7), np.zeros(3, np.int32), b"", lambda: None)
    assert refused is not None
    assert refused[0] == 400
    assert "3 KV pages" in refused[1]
    assert line.join(admit(1, 3, 6), np.zeros(3, np.int32), b"", lambda: None) is None


def test_no_bind_takes_more_room_than_it_is_planned_for() -> None:
    for pairs, ids in ((0, 0), (3, 0), (0, 5), (300, 900)):
        sampling = Sampling(
            *(0.1, 0.1, MOST_32, 0.1, MOST, MOST_32, 0.1, 0.1, 0.1),
            logit_bias=tuple((MOST_32, -0.1) for _ in range(pairs)),
            logprobs=20,
        )
        stop_ids = (MOST_32,) * ids
        message = Admit(MOST, MOST_32, SlabHandle(0, 0, 0), MOST_32, MOST_32, sampling, stop_ids)
        source = Input(0, 1, SlabHandle(MOST_32, MOST_32, MOST_32, MOST))
        bind = Bind(MOST, MOST_32, MOST_32, MOST_32, MOST_32, MOST_32, (source,), sampling, stop_ids, MOST_32)
        for count in (1, 40):
            taken = len(msgspec.msgpack.encode(StepTail((bind,) * count)))
            assert taken <= count * bind_bytes(message) + LIMITS.tail_bytes - LIMITS.bind_bytes
