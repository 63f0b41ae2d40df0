"""Waiting for a condition with a bound, for tests that watch real processes."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def _failure(what: str, timeout: float, last: object, error: Exception | None) -> AssertionError:
    seen = f"it last raised {error!r}" if error is not None else f"it was last {last!r}"
    return AssertionError(f"waited {timeout:g} s for {what}; {seen}")


def _name(predicate: Callable[[], object], what: str | None) -> str:
    return what or str(getattr(predicate, "__qualname__", predicate))


def wait_until(
    predicate: Callable[[], T],
    timeout: float = 5.0,
    *,
    what: str | None = None,
    interval: float = 0.005,
    excuse: tuple[type[Exception], ...] = (),
) -> T:
    """Call `predicate` until it is true and return what it returned.

    timeout and interval are in seconds. Exceptions of the types in `excuse` count as "not yet". Raises
    AssertionError, with the last value or exception, when the time is up. Must not be used in an event loop
    that has to make progress meanwhile: await `wait_until_async` there.
    """
    deadline = time.monotonic() + timeout
    while True:
        value: T | None = None
        error: Exception | None = None
        try:
            value = predicate()
        except excuse as caught:
            error = caught
        if value:
            return value
        if time.monotonic() >= deadline:
            raise _failure(_name(predicate, what), timeout, value, error)
        time.sleep(interval)


async def wait_until_async(
    predicate: Callable[[], Any],
    timeout: float = 5.0,  # noqa: ASYNC109 - the same signature as the plain one
    *,
    what: str | None = None,
    interval: float = 0.005,
    excuse: tuple[type[Exception], ...] = (),
) -> Any:
    """Like `wait_until`, for an event loop; the predicate may be plain or a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        value: Any = None
        error: Exception | None = None
        try:
            answer = predicate()
            value = await answer if inspect.isawaitable(answer) else answer
        except excuse as caught:
            error = caught
        if value:
            return value
        if time.monotonic() >= deadline:
            raise _failure(_name(predicate, what), timeout, value, error)
        await asyncio.sleep(interval)
