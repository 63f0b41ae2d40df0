"""The step ring: commit words, readers behind, errors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from shm.board import Board
from shm.doorbell import Doorbell
from shm.errors import LayoutMismatch, Poisoned, RingStuck, TornRecord
from shm.segment import Poison
from shm.steps import StepLayout, StepReader, StepRing, StepWriter
from shm.wait import Bell, Sleeper

LAYOUT = StepLayout(max_rows=7, max_grants=5, tail_bytes=100, slots=4, readers=2)


class Cell:
    """A leader and two readers, on mappings of their own, with a clock of their own."""

    def __init__(self) -> None:
        self.now = 0
        self.board = Board.create(3)
        self.doorbells = [Doorbell.create() for _ in range(3)]
        self.bells = [Bell(self.board.line(i), self.doorbells[i]) for i in range(3)]
        self.ring = StepRing.create(LAYOUT)
        self.other = StepRing.attach(os.dup(self.ring.segment.fd), LAYOUT)
        self.writer = StepWriter(self.ring, self.bells[:2], lambda: self.now)
        self.readers = [StepReader(self.other, i, self.bells[2]) for i in range(2)]

    def step(self, seq: int) -> None:
        self.writer.begin(seq)
        self.writer.commit(seq)

    def close(self) -> None:
        for segment in (self.board.segment, self.ring.segment, self.other.segment):
            segment.close()
        for doorbell in self.doorbells:
            doorbell.close()


@pytest.fixture
def cell() -> Iterator[Cell]:
    cell = Cell()
    yield cell
    cell.close()


def test_every_reader_sees_what_the_leader_wrote(cell: Cell) -> None:
    slot = cell.writer.begin(1)
    slot.header[15] = 2**64 - 1
    slot.request[:] = np.arange(7) << 40
    slot.rows[:] = np.arange(70).reshape(10, 7)
    slot.grants[:] = np.arange(15).reshape(3, 5)
    slot.drops[:] = -1
    slot.tail[:5] = b"binds"
    assert [reader.peek() for reader in cell.readers] == [None, None]
    cell.writer.commit(1)
    for reader in cell.readers:
        seen = reader.peek()
        assert seen is not None
        assert (seen.header[0], seen.header[15]) == (1, 2**64 - 1)
        assert seen.request.tolist() == [i << 40 for i in range(7)]
        assert seen.rows.tolist() == np.arange(70).reshape(10, 7).tolist()
        assert seen.grants.tolist() == np.arange(15).reshape(3, 5).tolist()
        assert seen.drops.tolist() == [-1] * 7
        assert bytes(seen.tail[:5]) == b"binds"


def test_every_column_of_every_slot_lies_on_a_cache_line_and_none_overlap(cell: Cell) -> None:
    seen: set[int] = set()
    for slot in cell.ring.slots():
        for array in (slot.request, slot.rows, slot.grants, slot.drops):
            start = array.ctypes.data
            assert start % 64 == 0
            span = set(range(start, start + array.nbytes))
            assert not span & seen
            seen |= span


def test_a_step_stays_until_the_reader_is_done_with_it(cell: Cell) -> None:
    cell.step(1)
    cell.step(2)
    reader = cell.readers[0]
    first = reader.peek()
    assert first is not None
    assert reader.peek() is first
    reader.done()
    second = reader.peek()
    assert second is not None
    assert second.header[0] == reader.next == 2


def test_slots_are_used_again_in_turn(cell: Cell) -> None:
    for seq in range(1, 20):
        cell.writer.begin(seq).request[0] = seq
        cell.writer.commit(seq)
        for reader in cell.readers:
            slot = reader.peek()
            assert slot is not None
            assert slot.request[0] == seq
            reader.done()
    assert [cell.writer.done(i) for i in range(2)] == [19, 19]


@pytest.mark.behaviour("F-01")
def test_a_full_ring_names_the_reader_its_last_step_its_stage_and_its_age(cell: Cell) -> None:
    line = cell.board.line(1)
    line.stage_name, line.beat = "capturing 3/12", 1_000_000_000
    for seq in range(1, 5):
        cell.now = seq * 1_000_000_000
        cell.step(seq)
        cell.readers[0].done()
    cell.readers[1].done()
    cell.step(5)
    cell.now = 14_000_000_000
    with pytest.raises(RingStuck) as caught:
        cell.writer.begin(6)
    error = caught.value
    assert (error.reader, error.done, error.behind, error.stage, error.age, error.silent) == (
        1,
        1,
        4,
        "capturing 3/12",
        12.0,
        13.0,
    )
    for part in ("reader 1", "4 steps behind", "capturing 3/12", "step 2 is unfinished for 12.0 s"):
        assert part in str(error)


@pytest.mark.behaviour("F-01")
def test_a_stage_without_a_name_is_shown_by_its_code(cell: Cell) -> None:
    cell.board.line(0).stage = 3
    for seq in range(1, 5):
        cell.step(seq)
    with pytest.raises(RingStuck, match=r"reader 0 .* its stage 3, .*no heartbeat"):
        cell.writer.begin(5)


def test_a_stuck_ring_goes_on_when_the_reader_does(cell: Cell) -> None:
    for seq in range(1, 5):
        cell.step(seq)
    with pytest.raises(RingStuck):
        cell.writer.begin(5)
    for reader in cell.readers:
        reader.done()
    cell.step(5)
    with pytest.raises(RingStuck):
        cell.writer.begin(6)


def test_a_slot_whose_commit_word_differs_is_torn_and_poisons_the_ring(cell: Cell) -> None:
    cell.step(1)
    cell.ring.slots()[0].header[0] = 9
    with pytest.raises(TornRecord, match="commit word 9, due is step 1"):
        cell.readers[0].peek()
    with pytest.raises(Poisoned, match=f"code {Poison.TORN.value}"):
        cell.writer.begin(2)


def test_a_slot_being_filled_is_not_committed(cell: Cell) -> None:
    for seq in range(1, 5):
        cell.step(seq)
        for reader in cell.readers:
            reader.done()
    assert cell.writer.begin(5).header[0] == 0
    assert not cell.readers[0].has_data()


def test_steps_follow_each_other_and_are_begun_before_they_are_committed(cell: Cell) -> None:
    with pytest.raises(ValueError, match="begin 1"):
        cell.writer.begin(2)
    with pytest.raises(ValueError, match="not begun"):
        cell.writer.commit(1)
    cell.step(1)
    with pytest.raises(ValueError, match="begin 2"):
        cell.writer.begin(1)
    with pytest.raises(ValueError, match="not begun"):
        cell.writer.commit(1)


def test_a_step_that_is_not_committed_cannot_be_done(cell: Cell) -> None:
    with pytest.raises(RuntimeError, match="step 1 is not committed"):
        cell.readers[0].done()


def test_only_those_who_sleep_are_rung(cell: Cell) -> None:
    Sleeper(cell.board.line(1)).announce(cell.readers[1].has_data)
    cell.step(1)
    cell.step(2)
    assert [bell.drain() for bell in cell.doorbells] == [0, 1, 0]
    assert cell.writer.statistics() == (2, 4, (2, 2), 1)


def test_a_step_is_published_before_the_fence_and_rung_after_it(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, doorbell = cell.readers[0], cell.doorbells[0]
    Sleeper(cell.board.line(0)).announce(reader.has_data)
    seen: list[tuple[bool, int]] = []
    monkeypatch.setattr("shm.steps.fence", lambda: seen.append((reader.has_data(), doorbell.drain())))
    cell.step(1)
    assert seen == [(True, 0)]
    assert doorbell.drain() == 1


def test_a_sleeping_leader_hears_of_a_finished_step_and_of_an_error(cell: Cell) -> None:
    sleeper = Sleeper(cell.board.line(2))
    cell.step(1)
    sleeper.announce(lambda: False)
    cell.readers[0].done()
    assert cell.doorbells[2].drain() == 1
    sleeper.announce(lambda: False)
    cell.readers[1].fail("slot 3 belongs to request 7, not 8")
    assert cell.doorbells[2].drain() == 1
    assert cell.writer.error(1) == "slot 3 belongs to request 7, not 8"
    assert cell.writer.error(0) is None
    assert cell.writer.done(0) == 1


def test_the_first_error_stays_and_a_long_one_is_cut_between_characters(cell: Cell) -> None:
    cell.readers[0].fail("é" * 1000)
    cell.readers[0].fail("second")
    assert cell.writer.error(0) == "é" * 512
    cell.readers[1].fail("")
    assert cell.writer.error(1) == ""


def test_statistics_tell_how_far_readers_are(cell: Cell) -> None:
    for seq in (1, 2, 3):
        cell.step(seq)
    cell.readers[0].done()
    assert cell.readers[0].statistics() == (1, 2)
    assert cell.writer.statistics().behind == (2, 3)


def test_a_cell_of_one_has_no_readers_and_is_never_full() -> None:
    layout = LAYOUT._replace(readers=0, slots=2)
    ring = StepRing.create(layout)
    writer = StepWriter(ring, [])
    for seq in range(1, 10):
        assert writer.begin(seq).rows.shape == (10, 7)
        writer.commit(seq)
    ring.close()


def test_a_reader_that_attaches_later_begins_at_its_first_unfinished_step(cell: Cell) -> None:
    cell.step(1)
    cell.step(2)
    cell.readers[0].done()
    assert StepReader(cell.ring, 0).next == 2


def test_another_layout_is_refused_and_both_are_named(cell: Cell) -> None:
    with pytest.raises(LayoutMismatch, match=r"max_rows=7.*max_rows=8"):
        StepRing.attach(os.dup(cell.ring.segment.fd), LAYOUT._replace(max_rows=8))


def test_a_layout_or_a_reader_that_cannot_be_is_refused(cell: Cell) -> None:
    for wrong in ({"max_rows": 0}, {"slots": 0}, {"readers": -1}, {"tail_bytes": -1}):
        with pytest.raises(ValueError, match="or more"):
            StepRing.create(LAYOUT._replace(**wrong))
    with pytest.raises(IndexError, match="reader 2"):
        StepReader(cell.ring, 2)
    with pytest.raises(ValueError, match="as many bells"):
        StepWriter(cell.ring, [])
