"""The order of a partition's walks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mstar.graph.errors import GraphError
from mstar.graph.schedule import Transition, WalkOrder

PREFILL_DECODE = WalkOrder(
    first=("prefill",),
    ends=frozenset(("decode",)),
    transitions=(Transition("prefill", "decode", local=True),),
)


def order(first: str, ends: str, *transitions: Transition) -> WalkOrder:
    return WalkOrder(tuple(first.split()), frozenset(ends.split()), transitions)


def test_a_worker_goes_on_by_itself_only_where_the_transition_is_local() -> None:
    assert PREFILL_DECODE.local_next("prefill") == "decode"
    assert PREFILL_DECODE.local_next("decode") is None
    assert order("a", "b", Transition("a", "b")).local_next("a") is None


def test_walks_are_listed_in_the_order_in_which_they_come() -> None:
    assert PREFILL_DECODE.walks == ("prefill", "decode")
    assert PREFILL_DECODE.before("decode") == ("prefill",)


def test_an_order_cannot_be_changed_through_what_it_was_made_of() -> None:
    inputs = {"a": ("x",)}
    made = WalkOrder(("a",), frozenset("a"), inputs=inputs)
    inputs["a"] = ()
    assert made.inputs["a"] == ("x",)


def test_a_walk_that_may_end_the_partition_can_also_be_followed_by_another() -> None:
    aligned = order("decode", "decode align", Transition("decode", "align"))
    assert aligned.walks == ("decode", "align")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: order("", "a"), r"a walk order has no first walk"),
        (lambda: order("a", ""), r"nothing follows walk 'a' and it ends nothing"),
        (lambda: order("a", "a b"), r"no request ever comes to walk 'b'"),
        (lambda: order("a", "b", Transition("a", "b"), Transition("c", "b")), r"comes to walk 'c'"),
        (lambda: order("a", "b", Transition("a", "b"), Transition("a", "b")), r"two transitions to the same"),
        (
            lambda: order("a", "b c", Transition("a", "b", local=True), Transition("a", "c")),
            r"walk 'a' has a local transition and another way to go on",
        ),
        (lambda: order("a", "a b", Transition("a", "b", local=True)), r"another way to go on"),
        (lambda: WalkOrder(("a",), frozenset("a"), inputs={"a": "prompt"}), r"are 'prompt'; give a tuple"),
        (lambda: order("@next", "a"), r"the walk name '@next' is not one"),
    ],
)
def test_an_order_that_cannot_be_followed_is_refused(make: Callable[[], WalkOrder], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()
