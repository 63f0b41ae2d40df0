"""The fair split of a step's token budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mstar.worker.batch import split_fairly

needs = st.lists(st.integers(1, 300), max_size=12)


def test_everybody_gets_all_that_fits() -> None:
    assert split_fairly([10, 3, 20], 33, 8) == [10, 3, 20]


def test_what_does_not_fit_is_split_evenly_and_short_rows_leave_their_rest() -> None:
    assert split_fairly([100, 10, 100], 90, 8) == [40, 10, 40]


def test_later_rows_wait_before_shares_fall_below_the_floor() -> None:
    assert split_fairly([100, 100, 100], 64, 32) == [32, 32, 0]


def test_a_room_below_the_floor_takes_only_an_input_that_ends_in_it() -> None:
    assert split_fairly([100, 5], 20, 32) == [0, 0]
    assert split_fairly([15, 100], 20, 32) == [15, 0]


@given(needs, st.integers(0, 900), st.integers(1, 64))
def test_a_share_is_never_more_than_needed_nor_below_the_floor(
    need: list[int], room: int, floor: int
) -> None:
    shares = split_fairly(need, room, floor)
    assert sum(shares) <= max(room, 0)
    for wanted, share in zip(need, shares, strict=True):
        assert share <= wanted
        assert share in (0, wanted) or share >= floor


@given(needs, st.integers(0, 900), st.integers(1, 64))
def test_no_row_gets_more_than_one_that_stays_short(need: list[int], room: int, floor: int) -> None:
    shares = split_fairly(need, room, floor)
    served = [place for place, share in enumerate(shares) if share]
    short = [place for place in served if shares[place] < need[place]]
    assert all(shares[place] <= shares[other] + 1 for place in served for other in short)
