"""The fair split of a step's token budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.worker.batch import split_fairly

needs = st.lists(st.integers(1, 300), max_size=12)
rooms = st.integers(-5, 900)
floors = st.integers(1, 64)


def serve(rows: list[int], room: int, floor: int) -> list[int]:
    """What is left of ``rows`` after a step, without those that ended in it."""
    shares = split_fairly(rows, room, floor)
    return [need - share for need, share in zip(rows, shares, strict=True) if need > share]


def test_everybody_gets_all_that_fits() -> None:
    assert split_fairly([10, 3, 20], 33, 8) == [10, 3, 20]
    assert split_fairly([], 33, 8) == []


@pytest.mark.behaviour("B-02")
def test_what_does_not_fit_is_split_evenly_and_short_rows_leave_their_rest() -> None:
    assert split_fairly([100, 10, 100], 90, 8) == [40, 10, 40]
    assert split_fairly([50, 100, 100], 210, 8) == [50, 80, 80]


def test_the_odd_tokens_go_to_the_oldest() -> None:
    assert split_fairly([100, 99, 98], 62, 8) == [21, 21, 20]


def test_later_rows_wait_before_shares_fall_below_the_floor() -> None:
    assert split_fairly([100, 100, 100], 64, 32) == [32, 32, 0]
    assert split_fairly([100, 100, 100], 95, 32) == [48, 47, 0]


@pytest.mark.behaviour("S4-27")
def test_a_room_below_the_floor_takes_only_an_input_that_ends_in_it() -> None:
    assert split_fairly([100], 1024 - 1023, 64) == [0]
    assert split_fairly([100], 1024 - 960, 64) == [64]
    assert split_fairly([15, 100], 20, 32) == [15, 0]


def test_nobody_passes_the_oldest_while_it_waits_for_its_floor() -> None:
    assert split_fairly([100, 5], 20, 32) == [0, 0]


@pytest.mark.behaviour("F-16")
def test_a_short_row_does_not_queue_behind_long_ones() -> None:
    assert split_fairly([16384] * 8 + [20], 256, 64) == [79, 79, 78, 0, 0, 0, 0, 0, 20]
    assert split_fairly([16384] * 8 + [60, 50, 4], 128, 64) == [64, 0, 0, 0, 0, 0, 0, 0, 60, 0, 4]


@given(needs, rooms, floors)
def test_a_share_is_never_more_than_needed_nor_below_the_floor(
    need: list[int], room: int, floor: int
) -> None:
    shares = split_fairly(need, room, floor)
    assert sum(shares) <= max(room, 0)
    for wanted, share in zip(need, shares, strict=True):
        assert 0 <= share <= wanted
        assert share in (0, wanted) or share >= floor


@pytest.mark.behaviour("B-02")
@given(needs, rooms, floors)
def test_no_row_gets_more_than_one_that_stays_short(need: list[int], room: int, floor: int) -> None:
    shares = split_fairly(need, room, floor)
    served = [place for place, share in enumerate(shares) if share]
    short = [place for place in served if shares[place] < need[place]]
    assert all(shares[place] <= shares[other] + 1 for place in served for other in short)
    assert all(shares[older] >= shares[younger] for older in short for younger in short if older < younger)


@given(needs, rooms, floors)
def test_room_is_left_only_where_nobody_who_waits_can_use_it(need: list[int], room: int, floor: int) -> None:
    shares = split_fairly(need, room, floor)
    left = room - sum(shares)
    if need and room >= min(need[0], floor):
        assert all(share or left < min(wanted, floor) for wanted, share in zip(need, shares, strict=True))
        assert not left or all(share in (0, wanted) for wanted, share in zip(need, shares, strict=True))
    else:
        assert not any(shares)


@given(needs.filter(bool), rooms, floors)
def test_the_oldest_row_gets_its_floor_whenever_that_fits(need: list[int], room: int, floor: int) -> None:
    least = min(need[0], floor)
    assert (split_fairly(need, room, floor)[0] >= least) == (room >= least)


@pytest.mark.behaviour("F-16")
@given(needs.filter(bool), st.integers(1, 64), rooms, floors)
def test_a_short_row_goes_whole_however_many_long_ones_are_before_it(
    longs: list[int], short: int, spare: int, floor: int
) -> None:
    rows = [max(need, floor + 1) for need in longs] + [min(short, floor)]
    room = floor + rows[-1] + max(spare, 0)
    assert split_fairly(rows, room, floor)[-1] == rows[-1]


@given(needs, rooms, floors)
def test_longer_rows_wait_in_their_order(need: list[int], room: int, floor: int) -> None:
    shares = split_fairly(need, room, floor)
    served = [share > 0 for wanted, share in zip(need[1:], shares[1:], strict=True) if wanted > floor]
    assert served == sorted(served, reverse=True)


@given(
    st.lists(st.integers(65, 300), min_size=1, max_size=6),
    st.integers(1, 64),
    st.lists(st.lists(st.integers(1, 64), max_size=8), min_size=1, max_size=8),
    st.integers(0, 100),
)
def test_long_rows_end_in_bounded_steps_under_ever_new_short_ones(
    longs: list[int], floor: int, arrivals: list[list[int]], spare: int
) -> None:
    ids = list(range(len(longs)))
    rows = list(longs)
    bound = sum(-(-need // floor) for need in longs)
    for step in range(bound):
        if not ids:
            break
        came = arrivals[step % len(arrivals)]
        rows += came
        ids += [-1] * len(came)
        shares = split_fairly(rows, floor + spare, floor)
        rows = [need - share for need, share in zip(rows, shares, strict=True)]
        ids = [row for row, need in zip(ids, rows, strict=True) if need]
        rows = [need for need in rows if need]
        assert len(rows) == len(ids)
        ids = ids if any(row >= 0 for row in ids) else []
        rows = rows if ids else []
    assert not ids


@given(needs, st.integers(64, 900), floors)
def test_whoever_is_in_line_ends_though_nobody_new_comes(need: list[int], room: int, floor: int) -> None:
    rows = need
    for _ in range(len(need) * 300):
        if not rows:
            break
        rows = serve(rows, room, floor)
    assert not rows
