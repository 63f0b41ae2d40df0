"""The byte ring: order, room, wrap-around, control records, damage."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.board import Board
from shm.doorbell import Doorbell
from shm.errors import LayoutMismatch, Poisoned, RecordTooLarge, TornRecord
from shm.ring import Ring, RingReader, RingWriter
from shm.segment import Poison
from shm.wait import Bell, Sleeper

CAPACITY = 4096


class Pair:
    """Both ends of one small ring, on mappings of their own."""

    def __init__(self, reserved: int = 1024) -> None:
        self.ring = Ring.create(CAPACITY, reserved=reserved)
        self.writer = RingWriter(self.ring, None)
        self.reader = RingReader(Ring.attach(os.dup(self.ring.segment.fd)))

    def take(self) -> bytes | None:
        record = self.reader.peek()
        if record is None:
            return None
        taken = bytes(record)
        self.reader.release()
        return taken

    def peek(self) -> bytes | None:
        record = self.reader.peek()
        return None if record is None else bytes(record)

    def fill(self, size: int = 56, *, control: bool = False) -> int:
        count = 0
        while self.writer.send(bytes(size), control=control):
            count += 1
        return count

    def close(self) -> None:
        self.ring.close()
        self.reader.ring.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_records_arrive_in_order_and_whole(pair: Pair) -> None:
    sent = [bytes([i]) * size for i, size in enumerate((0, 1, 55, 56, 57, 200, 1024))]
    for record in sent:
        assert pair.writer.send(record)
    assert [pair.take() for _ in sent] == sent
    assert pair.take() is None


def test_a_peeked_record_stays_until_it_is_released(pair: Pair) -> None:
    pair.writer.send(b"one")
    pair.writer.send(b"two")
    assert pair.peek() == pair.peek() == b"one"
    pair.reader.release()
    assert pair.peek() == b"two"


def test_a_peeked_record_is_read_only(pair: Pair) -> None:
    pair.writer.send(b"one")
    record = pair.reader.peek()
    assert record is not None
    assert record.readonly


def test_releasing_nothing_is_an_error(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="peek"):
        pair.reader.release()
    pair.writer.send(b"one")
    with pytest.raises(RuntimeError, match="peek"):
        pair.reader.release()


def test_a_record_that_does_not_fit_before_the_end_starts_over(pair: Pair) -> None:
    for i in range(40):
        record = bytes([i]) * (700 + i)
        assert pair.writer.send(record)
        assert pair.take() == record
    assert pair.reader.statistics().nbytes > 3 * CAPACITY


def test_parts_arrive_as_one_record(pair: Pair) -> None:
    columns = np.arange(6, dtype=np.int32).reshape(2, 3)
    parts: list[Any] = [b"head", bytearray(b"!"), memoryview(b"view"), np.array([], np.int64), columns]
    assert pair.writer.send_parts(parts)
    assert pair.take() == b"head!view" + columns.tobytes()


def test_strided_parts_are_refused_and_leave_the_ring_as_it_was(pair: Pair) -> None:
    with pytest.raises(TypeError, match="C-contiguous"):
        pair.writer.send_parts([memoryview(bytes(6))[::2]])
    assert pair.writer.send(b"next")
    assert pair.take() == b"next"


def test_a_full_ring_refuses_and_takes_again_after_a_release(pair: Pair) -> None:
    assert pair.fill() == (CAPACITY - 1024) // 64
    assert pair.writer.room == 0
    assert pair.take() == bytes(56)
    assert pair.writer.room == 64
    assert pair.writer.send(bytes(56))
    assert not pair.writer.send(b"")
    assert pair.writer.statistics().refused == 2


@pytest.mark.behaviour("F-18")
def test_control_records_have_room_when_data_has_filled_the_ring(pair: Pair) -> None:
    data = pair.fill()
    assert not pair.writer.send(b"data")
    aborts = [b"abort %d" % i for i in range(16)]
    for abort in aborts:
        assert pair.writer.send(abort, control=True)
    assert not pair.writer.send(b"one too many", control=True)
    assert [pair.take() for _ in range(data)] == [bytes(56)] * data
    assert [pair.take() for _ in aborts] == aborts


@pytest.mark.behaviour("F-18")
@pytest.mark.parametrize("start", range(0, CAPACITY, 192))
def test_control_has_room_wherever_the_end_of_the_ring_lies(pair: Pair, start: int) -> None:
    for _ in range(start // 64):
        pair.writer.send(bytes(56))
        pair.take()
    pair.fill(200)
    assert pair.writer.send(bytes(504), control=True)


def test_data_waits_until_control_records_have_left_its_share(pair: Pair) -> None:
    while pair.writer.send(bytes(56), control=True):
        pass
    assert pair.writer.room == 0
    for _ in range(16):
        pair.take()
    assert pair.writer.room == 0
    pair.take()
    assert pair.writer.room == 64


def test_the_reserved_room_is_a_quarter_at_most() -> None:
    ring = Ring.create(CAPACITY)
    assert ring.reserved == CAPACITY // 4
    ring.close()


def test_a_record_over_a_quarter_is_refused_for_good(pair: Pair) -> None:
    assert pair.writer.send(bytes(CAPACITY // 4))
    with pytest.raises(RecordTooLarge, match=f"{CAPACITY // 4 + 1} bytes exceeds {CAPACITY // 4}"):
        pair.writer.send(bytes(CAPACITY // 4 + 1))
    with pytest.raises(RecordTooLarge):
        pair.writer.send_parts([bytes(CAPACITY // 4), b"."])


@pytest.mark.parametrize("start", range(64))
def test_the_largest_record_fits_an_empty_ring_wherever_it_starts(start: int) -> None:
    pair = Pair()
    for _ in range(start):
        pair.writer.send(b"")
        pair.take()
    assert pair.writer.send(bytes(CAPACITY // 4))
    assert pair.take() == bytes(CAPACITY // 4)
    pair.close()


def test_a_poisoned_ring_takes_nothing_and_can_be_drained(pair: Pair) -> None:
    pair.writer.send(b"last")
    pair.ring.segment.poison(Poison.PEER_LOST)
    with pytest.raises(Poisoned, match="code 1") as caught:
        pair.writer.send(b"more")
    assert caught.value.code == Poison.PEER_LOST
    assert pair.take() == b"last"


@pytest.mark.parametrize("word", [0, 5, 1 << 32 | 100, 3000, (1 << 64) - 2])
def test_a_record_that_is_not_the_one_due_is_torn_and_poisons(pair: Pair, word: int) -> None:
    pair.writer.send(b"first")
    pair.take()
    pair.writer.send(b"second")
    pair.ring.segment.words[(4096 + 64) >> 3] = word
    with pytest.raises(TornRecord, match="due is position 1"):
        pair.reader.peek()
    assert pair.ring.segment.poisoned == Poison.TORN


def test_an_unfinished_record_is_not_seen(pair: Pair) -> None:
    data = pair.ring.segment.buf[4096:]
    data[8:16] = b"half of "
    pair.ring.segment.words[4096 >> 3] = 500
    assert pair.reader.peek() is None
    assert not pair.reader.has_data()


def test_a_reader_that_starts_later_goes_on_where_the_first_stopped(pair: Pair) -> None:
    for i in range(3):
        pair.writer.send(b"%d" % i)
    pair.take()
    pair.reader = RingReader(pair.ring)
    assert pair.take() == b"1"
    assert pair.take() == b"2"


def test_statistics_count_records_bytes_and_rings() -> None:
    board, doorbell, ring = Board.create(1), Doorbell.create(), Ring.create(CAPACITY)
    writer, reader = RingWriter(ring, Bell(board.line(0), doorbell)), RingReader(ring)
    Sleeper(board.line(0)).announce(reader.has_data)
    for _ in range(3):
        writer.send(b"x")
    assert writer.statistics() == (3, 192, 0, 1, 192, CAPACITY)
    assert reader.statistics() == (0, 0, 192, CAPACITY)
    reader.peek()
    reader.release()
    assert reader.statistics() == (1, 64, 128, CAPACITY)
    for part in (board, doorbell, ring):
        part.close()


def test_a_refused_writer_is_rung_once_the_ring_is_empty() -> None:
    doorbell = Doorbell.create()
    ring = Ring.create(CAPACITY)
    writer, reader = RingWriter(ring, None), RingReader(ring, doorbell)
    count = 0
    while writer.send(bytes(500)):
        count += 1
    for i in range(count):
        assert not select.select([doorbell.fd], [], [], 0)[0], i
        reader.peek()
        reader.release()
    assert doorbell.drain() == 1
    writer.send(b"next")
    reader.peek()
    reader.release()
    assert doorbell.drain() == 0
    doorbell.close()
    ring.close()


def test_room_that_comes_while_the_writer_asks_for_it_is_used(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.fill()
    refused = pair.writer.refused
    monkeypatch.setattr("shm.ring.fence", lambda: pair.take())
    assert pair.writer.send(b"just in time")
    assert pair.writer.refused == refused


@pytest.mark.parametrize("capacity", [0, 2048, 5000, 4095])
def test_a_capacity_that_is_no_power_of_two_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"not {capacity}"):
        Ring.create(capacity)


def test_an_overwritten_capacity_is_refused(pair: Pair) -> None:
    pair.ring.segment.words[32] = 1 << 40
    with pytest.raises(LayoutMismatch, match="claims"):
        Ring.attach(os.dup(pair.ring.segment.fd))


OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, CAPACITY // 4), st.booleans()),
    st.tuples(st.just("read"), st.integers(1, 20), st.just(False)),
    st.tuples(st.just("stall"), st.integers(1, 100), st.booleans()),
)


@pytest.mark.behaviour("F-03")
@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATIONS, max_size=80), st.sampled_from([0, 256, 1024]))
def test_a_full_ring_never_loses_order(trace: list[tuple[str, int, bool]], reserved: int) -> None:
    """Writers of a stalled reader hold back what was refused and offer it first, data and control apart."""
    pair = Pair(reserved)
    waiting: dict[bool, deque[bytes]] = {False: deque(), True: deque()}
    accepted: list[bytes] = []
    received: list[bytes] = []
    numbers = iter(range(1 << 20))

    def offer() -> None:
        for control, queue in waiting.items():
            while queue and pair.writer.send(queue[0], control=control):
                accepted.append(queue.popleft())

    def write(size: int, control: bool) -> None:
        waiting[control].append(next(numbers).to_bytes(4, "little") + bytes(max(0, size - 4)))
        offer()

    for operation, amount, control in trace:
        if operation == "write":
            write(amount, control)
        elif operation == "stall":
            for _ in range(amount):
                write(100, control)
        else:
            for _ in range(amount):
                record = pair.take()
                if record is not None:
                    received.append(record)
    while True:
        offer()
        record = pair.take()
        if record is None:
            break
        received.append(record)
    assert not waiting[False]
    assert not waiting[True]
    assert received == accepted
    assert len(received) == next(numbers)
    pair.close()


WRITER = """
    import os, sys
    from shm.ring import Ring, RingWriter
    writer = RingWriter(Ring.attach(int(sys.argv[1])), None)
    k = 0
    while True:
        record = bytes([k & 255]) * (1 + k * 977 % 60000)
        while not writer.send(record):
            os.sched_yield()
        k += 1
"""


@pytest.mark.behaviour("F-07")
def test_a_writer_killed_in_the_middle_leaves_no_half_record() -> None:
    for kill_after in (1, 40, 90):
        ring = Ring.create(1 << 18)
        reader = RingReader(ring)
        fd = ring.segment.fd
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), str(fd)], pass_fds=[fd])
        got = 0
        while True:
            record = reader.peek()
            if record is not None:
                assert record == bytes([got & 255]) * (1 + got * 977 % 60000)
                got += 1
                reader.release()
                if got == kill_after:
                    child.kill()
            elif child.poll() is not None:
                break
        child.wait()
        assert got >= kill_after
        ring.close()
