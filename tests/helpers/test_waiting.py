"""The helpers of the suite do what their names say."""

from __future__ import annotations

import pytest

from tests.helpers import wait_until, wait_until_async


def test_wait_until_returns_the_first_true_value() -> None:
    values = iter([0, "", 7])
    assert wait_until(lambda: next(values)) == 7


def test_wait_until_fails_with_what_it_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"waited 0\.01 s for the moon; it was last 0"):
        wait_until(lambda: 0, 0.01, what="the moon")


def test_wait_until_excuses_only_the_named_errors() -> None:
    attempts = iter([FileNotFoundError("not yet"), None])

    def predicate() -> bool:
        error = next(attempts)
        if error is not None:
            raise error
        return True

    assert wait_until(predicate, excuse=(FileNotFoundError,))
    with pytest.raises(StopIteration):
        wait_until(predicate, excuse=(FileNotFoundError,))


async def test_wait_until_async_takes_plain_and_coroutine_predicates() -> None:
    async def soon() -> str:
        return "done"

    assert await wait_until_async(soon) == "done"
    assert await wait_until_async(lambda: 3) == 3
