"""TokenStop: a row ends at its own stop ids, whoever else has which."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mstar.engine.stop import TokenStop

ids = st.sampled_from([0, 1, 2, 65535, 65536, 65537, 65538, 131072, 2**31 - 1])


def hits(stop: TokenStop, *tokens: int) -> list[int]:
    """Places of ``tokens``, one for each slot from 0, that end their row."""
    return stop.hits(np.arange(len(tokens)), np.array(tokens, np.int32))


def test_nothing_stops_without_stop_ids() -> None:
    stop = TokenStop()
    stop.bind(0, ())
    assert hits(stop, 2, 3) == []


def test_ids_that_share_their_low_bits_are_told_apart() -> None:
    stop = TokenStop()
    stop.bind(0, (65537,))
    assert hits(stop, 1) == []
    assert hits(stop, 65537) == [0]


def test_a_token_that_was_never_sampled_stops_nothing() -> None:
    stop = TokenStop()
    stop.bind(0, (65535, 0))
    assert hits(stop, -1) == []


@given(
    rows=st.lists(st.frozensets(ids, max_size=4), min_size=1, max_size=6),
    gone=st.sets(st.integers(0, 5)),
    data=st.data(),
)
def test_exactly_the_rows_at_one_of_their_own_ids_stop(
    rows: list[frozenset[int]], gone: set[int], data: st.DataObject
) -> None:
    stop = TokenStop()
    for slot, row in enumerate(rows):
        stop.bind(slot, tuple(row))
    for slot in gone:
        stop.release(slot)
    tokens = data.draw(st.lists(ids, min_size=len(rows), max_size=len(rows)))
    owed = [slot for slot, row in enumerate(rows) if slot not in gone and tokens[slot] in row]
    assert hits(stop, *tokens) == owed


def test_a_slot_that_is_bound_again_has_only_its_new_ids() -> None:
    stop = TokenStop()
    stop.bind(0, (7, 8))
    stop.release(0)
    stop.bind(0, (9,))
    assert hits(stop, 7) == []
    assert hits(stop, 9) == [0]
