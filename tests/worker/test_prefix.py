"""The prefix index: in which order pages go, also when its log has to be put in order."""

from __future__ import annotations

import numpy as np
import pytest

from mstar.worker.prefix import PrefixIndex

PAGES = 8


def filed(count: int = PAGES) -> PrefixIndex:
    index = PrefixIndex(PAGES)
    for page in range(count):
        index.add([page], page.to_bytes(16, "big"))
    return index


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_pages_that_woke_and_rested_again_go_last_however_often_they_did() -> None:
    index = filed()
    index.rest(pages(*range(PAGES)))
    for _ in range(5 * PAGES):
        index.wake(pages(0, 3))
        index.rest(pages(3, 0))
    assert index.rests().tolist() == [1, 2, 4, 5, 6, 7, 3, 0]
    assert index.evict(2).tolist() == [1, 2]
    assert index.evict(6).tolist() == [4, 5, 6, 7, 3, 0]
    assert index.resting == len(index) == 0


def test_what_is_awake_is_not_evicted() -> None:
    index = filed()
    index.rest(pages(0, 1, 2))
    index.wake(pages(0))
    assert index.evict(2).tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="1 of 1 pages to evict were not found"):
        index.evict(1)


def test_a_page_that_was_forgotten_can_hold_something_else() -> None:
    index, new = filed(), b"x" * 16
    index.forget(pages(5))
    assert index.holds(5) is None
    assert index.find((5).to_bytes(16, "big"), 1).size == 0
    assert index.add([5], new) == [5]
    assert index.find(new, 1).tolist() == [5]
