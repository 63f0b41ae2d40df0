"""Leases: taken, given back, reclaimed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.errors import BadHandle, LayoutMismatch, Poisoned, RecordTooLarge, SlabExhausted
from shm.slab import SlabHandle, SlabOwner, SlabPool, SlabUser

CLASSES = [(4096, 3), (16384, 2)]


class Shelf:
    """An owner and a user of one small pool, on mappings of their own."""

    def __init__(self) -> None:
        self.pool = SlabPool.create(CLASSES)
        self.owner = SlabOwner(self.pool)
        self.user = SlabUser(SlabPool.attach(os.dup(self.pool.segment.fd)))

    def close(self) -> None:
        self.pool.close()
        self.user.pool.close()


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.close()


def test_what_the_owner_wrote_the_user_reads_without_a_copy(shelf: Shelf) -> None:
    handle = shelf.owner.lease(5000)
    shelf.owner.view(handle)[:] = bytes(range(250)) * 20
    seen = shelf.user.view(handle)
    assert seen == bytes(range(250)) * 20
    assert seen.readonly
    array = np.frombuffer(seen, np.uint8)
    shelf.owner.view(handle)[0] = 77
    assert array[0] == 77


def test_a_handle_travels_in_a_message(shelf: Shelf) -> None:
    handle = shelf.owner.lease(10)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=SlabHandle) == handle


def test_a_block_given_back_is_leased_again(shelf: Shelf) -> None:
    first = [shelf.owner.lease(16384) for _ in range(2)]
    with pytest.raises(SlabExhausted, match="16384 bytes"):
        shelf.owner.lease(16384)
    shelf.user.give_back(first[0])
    again = shelf.owner.lease(16384)
    assert again.block == first[0].block
    assert again.lease != first[0].lease


def test_the_smallest_free_block_that_is_large_enough_is_taken(shelf: Shelf) -> None:
    sizes = [shelf.pool.sizes[shelf.owner.lease(100).block] for _ in range(5)]
    assert sizes == [4096, 4096, 4096, 16384, 16384]
    with pytest.raises(SlabExhausted):
        shelf.owner.lease(0)


def test_a_small_block_that_was_given_back_is_taken_before_a_large_one(shelf: Shelf) -> None:
    small = [shelf.owner.lease(100) for _ in range(3)]
    shelf.user.give_back(small[1])
    assert shelf.owner.lease(100).block == small[1].block


def test_more_than_the_largest_block_never_fits(shelf: Shelf) -> None:
    with pytest.raises(RecordTooLarge, match="16385 bytes do not fit"):
        shelf.owner.lease(16385)
    with pytest.raises(ValueError, match="0 bytes or more"):
        shelf.owner.lease(-1)


def test_giving_back_twice_is_an_error_and_frees_nobody_elses_lease(shelf: Shelf) -> None:
    handle = shelf.owner.lease(4096)
    shelf.user.give_back(handle)
    with pytest.raises(BadHandle, match="has ended"):
        shelf.user.give_back(handle)
    for _ in range(3):
        shelf.owner.lease(4096)  # the block has a new lease now
    with pytest.raises(BadHandle, match="has ended"):
        shelf.user.give_back(handle)
    with pytest.raises(BadHandle, match="has ended"):
        shelf.user.view(handle)
    assert shelf.owner.leased == 3


def test_the_owner_releases_what_nobody_else_will_give_back(shelf: Shelf) -> None:
    handle = shelf.owner.lease(1)
    shelf.owner.release(handle)
    assert shelf.owner.leased == 0
    with pytest.raises(BadHandle):
        shelf.owner.view(handle)


@pytest.mark.parametrize(
    "change", [{"block": 99}, {"block": -1}, {"offset": 0}, {"nbytes": 4097}, {"nbytes": -1}, {"lease": 9}]
)
def test_a_handle_that_does_not_fit_the_pool_is_refused(shelf: Shelf, change: dict[str, int]) -> None:
    handle = msgspec.structs.replace(shelf.owner.lease(10), **change)
    with pytest.raises(BadHandle):
        shelf.user.view(handle)


def test_a_handle_without_a_lease_number_names_the_current_one(shelf: Shelf) -> None:
    handle = msgspec.structs.replace(shelf.owner.lease(10), lease=0)
    shelf.user.give_back(handle)
    assert shelf.owner.leased == 0


def test_what_a_dead_user_held_is_reclaimed_and_the_rest_stays(shelf: Shelf) -> None:
    shelf.owner.lease(1, user="gateway-0")
    kept = shelf.owner.lease(1, user="gateway-1")
    back = shelf.owner.lease(1, user="gateway-0")
    shelf.user.give_back(back)
    assert shelf.owner.reclaim("gateway-0") == 1
    assert shelf.owner.leased == 1
    assert shelf.user.view(kept).nbytes == 1
    assert shelf.owner.statistics().reclaimed == 1


def test_the_successor_of_a_dead_owner_takes_over_its_leases_and_reclaims_them(shelf: Shelf) -> None:
    held = [shelf.owner.lease(1) for _ in range(2)]
    successor = SlabOwner(SlabPool.attach(os.dup(shelf.pool.segment.fd)))
    assert successor.leased == 2
    shelf.user.give_back(held[0])
    assert successor.leased == 1
    assert successor.reclaim() == 1
    assert successor.free_bytes == 3 * 4096 + 2 * 16384
    assert SlabOwner(shelf.pool).leased == 0
    successor.pool.close()


def test_a_poisoned_pool_leases_nothing_and_can_still_be_read(shelf: Shelf) -> None:
    handle = shelf.owner.lease(10)
    shelf.pool.segment.poison(1)
    with pytest.raises(Poisoned):
        shelf.owner.lease(10)
    assert shelf.user.view(handle).nbytes == 10


def test_statistics_follow_the_leases(shelf: Shelf) -> None:
    handle = shelf.owner.lease(5000)
    seen = shelf.owner.statistics()
    assert (seen.blocks, seen.leased, seen.free_bytes, seen.nbytes) == (
        5,
        1,
        3 * 4096 + 16384,
        3 * 4096 + 32768,
    )
    shelf.user.give_back(handle)
    assert shelf.owner.statistics().leased == 0
    assert shelf.owner.statistics().leases == 1


def test_blocks_are_whole_pages_and_equal_sizes_are_one_class() -> None:
    pool = SlabPool.create([(5000, 1), (8192, 2), (1, 1)])
    assert pool.classes == ((4096, 1), (8192, 3))
    assert all(offset % 4096 == 0 for offset in pool.offsets)
    pool.close()


@pytest.mark.parametrize("classes", [[], [(0, 1)], [(1, 0)], [(4096 * i, 1) for i in range(1, 66)]])
def test_classes_that_cannot_be_are_refused(classes: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="block class"):
        SlabPool.create(classes)


@pytest.mark.parametrize(("word", "value"), [(0, 65), (2, 1 << 20)])
def test_an_overwritten_class_table_is_refused(shelf: Shelf, word: int, value: int) -> None:
    shelf.pool.segment.words[word] = value
    with pytest.raises(LayoutMismatch, match="claims"):
        SlabPool.attach(os.dup(shelf.pool.segment.fd))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["lease", "give", "release"]), st.integers(0, 16384)), max_size=60))
def test_no_block_is_ever_leased_twice_or_lost(trace: list[tuple[str, int]]) -> None:
    shelf = Shelf()
    held: dict[int, SlabHandle] = {}
    for action, number in trace:
        if action == "lease":
            try:
                handle = shelf.owner.lease(number)
            except SlabExhausted:
                assert all(block in held for block, size in enumerate(shelf.pool.sizes) if size >= number)
                continue
            assert handle.block not in held
            held[handle.block] = handle
        elif held:
            handle = held.pop(sorted(held)[number % len(held)])
            (shelf.user.give_back if action == "give" else shelf.owner.release)(handle)
        assert shelf.owner.leased == len(held)
    free = sum(size for block, size in enumerate(shelf.pool.sizes) if block not in held)
    assert shelf.owner.free_bytes == free
    shelf.close()


def test_a_handle_of_one_generation_names_nothing_in_another() -> None:
    """For a moment users see a dead owner's pool while its successor leases the same block of a new one."""
    old, new = (SlabPool.create([(4096, 2)], generation=generation) for generation in (1, 2))
    first, second = SlabOwner(old).lease(10), SlabOwner(new).lease(10)
    assert (first.block, first.offset) == (second.block, second.offset)
    with pytest.raises(BadHandle, match="has ended"):
        old.place(second)
    with pytest.raises(BadHandle, match="has ended"):
        new.place(first)
    old.close()
    new.close()
