"""Kinds of values: a check each, which returns the value in its plain form or says what is allowed.

JSON has one kind of number: an integral float is an integer, an integer is a float, and a boolean is
neither. A check raises RequestInvalid with the path of the offending member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstar.validation.errors import RequestInvalid

__all__ = [
    "Kind",
    "anything",
    "bias_map",
    "boolean",
    "describe",
    "integer",
    "integer_list",
    "mapping",
    "number",
    "one_of",
    "record",
    "stop_list",
    "string",
    "token_array",
]

LONGEST_SHOWN = 80


class Kind(NamedTuple):
    """A named check. ``check(value, path)`` returns the plain value or raises RequestInvalid."""

    name: str
    allowed: str
    check: Callable[[Any, str], Any]


def describe(value: object) -> str:
    """The value as a message shows it: short, and with the name of its type where it is no scalar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        shown = repr(value)
        return shown if len(shown) <= LONGEST_SHOWN else f"a string of {len(value)} characters"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "an integer of more than 20 digits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return f"an object of {len(value)} members"
    if isinstance(value, list | np.ndarray):
        return f"a list of {len(value)} members"
    return f"a value of type {type(value).__name__}"


def _invalid(value: object, path: str, allowed: str, code: str = "invalid_value") -> RequestInvalid:
    return RequestInvalid(f"`{path}` must be {allowed}, not {describe(value)}.", path, code)


def _is_integral(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def integer(low: int, high: int | None = None, *, also: int | None = None) -> Kind:
    """An integer from ``low`` to ``high``, both included, or the one value ``also``."""
    allowed = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    if also is not None:
        allowed += f", or {also}"

    def check(value: Any, path: str) -> int:
        if not _is_integral(value):
            raise _invalid(value, path, allowed, "invalid_type")
        found = int(value)
        if found != also and (found < low or (high is not None and found > high)):
            raise _invalid(found, path, allowed)
        return found

    return Kind("integer", allowed, check)


def number(low: float, high: float, *, above: bool = False) -> Kind:
    """A number from ``low`` to ``high``; with ``above`` the lower end itself is not allowed."""
    start = f"above {low:g} and at most" if above else f"from {low:g} to"
    allowed = f"a number {start} {high:g}"

    def check(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _invalid(value, path, allowed, "invalid_type")
        if not low <= value <= high or (above and value == low) or math.isnan(value):
            raise _invalid(value, path, allowed)
        return float(value)

    return Kind("number", allowed, check)


def boolean() -> Kind:
    """true or false."""

    def check(value: Any, path: str) -> bool:
        if not isinstance(value, bool):
            raise _invalid(value, path, "true or false", "invalid_type")
        return value

    return Kind("boolean", "true or false", check)


def string() -> Kind:
    """Any string."""

    def check(value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise _invalid(value, path, "a string", "invalid_type")
        return value

    return Kind("string", "a string", check)


def one_of(*values: object) -> Kind:
    """One of a few constants."""
    allowed = " or ".join(
        repr(value) if not isinstance(value, bool) else str(value).lower() for value in values
    )

    def check(value: Any, path: str) -> Any:
        if not any(value == one and type(value) is type(one) for one in values):
            raise _invalid(value, path, allowed)
        return value

    return Kind("constant", allowed, check)


def stop_list(most: int, longest: int) -> Kind:
    """A string, or up to ``most`` strings, each of 1 to ``longest`` characters; a tuple of them."""
    allowed = f"a string or a list of up to {most} strings, each of 1 to {longest} characters"

    def check(value: Any, path: str) -> tuple[str, ...]:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise _invalid(value, path, allowed, "invalid_type")
        if len(value) > most:
            raise _invalid(value, path, allowed)
        for index, stop in enumerate(value):
            if not isinstance(stop, str):
                raise _invalid(stop, f"{path}[{index}]", "a string", "invalid_type")
            if not 1 <= len(stop) <= longest:
                raise _invalid(stop, f"{path}[{index}]", f"a string of 1 to {longest} characters")
        return tuple(dict.fromkeys(value))

    return Kind("string or list of strings", allowed, check)


def integer_list(most: int) -> Kind:
    """Up to ``most`` integers of at least 0, as a tuple."""
    allowed = f"a list of up to {most} token ids"

    def check(value: Any, path: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise _invalid(value, path, allowed, "invalid_type")
        if len(value) > most:
            raise _invalid(value, path, allowed)
        for index, one in enumerate(value):
            if not _is_integral(one) or one < 0:
                raise _invalid(one, f"{path}[{index}]", "a token id, an integer of at least 0")
        return tuple(dict.fromkeys(int(one) for one in value))

    return Kind("list of integers", allowed, check)


def bias_map(most: int) -> Kind:
    """Token ids, written as strings, to a bias from -100 to 100; pairs in the order given."""
    allowed = f"an object of up to {most} members, token id to a number from -100 to 100"

    def check(value: Any, path: str) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            raise _invalid(value, path, allowed, "invalid_type")
        if len(value) > most:
            raise _invalid(value, path, allowed)
        pairs: dict[int, float] = {}
        bias = number(-100, 100)
        for key, one in value.items():
            text = str(key)
            if not (text.isascii() and text.isdigit() and len(text) <= 10):
                raise _invalid(key, path, "an object whose names are token ids")
            pairs[int(text)] = bias.check(one, f"{path}[{text}]")
        return tuple(pairs.items())

    return Kind("object", allowed, check)


def record(fields: dict[str, Kind]) -> Kind:
    """An object of the given members, each of which may be null or missing; others are refused by name."""
    allowed = "an object of " + ", ".join(f"`{name}` ({kind.allowed})" for name, kind in fields.items())

    def check(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _invalid(value, path, allowed, "invalid_type")
        checked: dict[str, Any] = {}
        for name, one in value.items():
            if one is None:
                continue
            if name not in fields:
                raise RequestInvalid(
                    f"`{path}.{name}` is not supported; allowed are {', '.join(fields)}.",
                    f"{path}.{name}",
                    "unsupported_parameter",
                )
            checked[name] = fields[name].check(one, f"{path}.{name}")
        return checked

    return Kind("object", allowed, check)


def mapping(reserved: frozenset[str]) -> Kind:
    """An object of any members except the reserved names."""
    allowed = "an object"
    if reserved:
        allowed += f" without the names {', '.join(sorted(reserved))}"

    def check(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _invalid(value, path, allowed, "invalid_type")
        for name in value:
            if name in reserved:
                raise RequestInvalid(
                    f"`{path}.{name}` is set by the server; leave it out.", f"{path}.{name}", "invalid_value"
                )
        return value

    return Kind("object", allowed, check)


def anything(allowed: str) -> Kind:
    """A value whose check lies elsewhere."""
    return Kind(allowed, allowed, lambda value, path: value)


def token_array(value: Sequence[Any] | NDArray[np.int64], path: str) -> NDArray[np.int64]:
    """A list of token ids as int64 [n]. Raises RequestInvalid with the index of what is none."""
    if isinstance(value, np.ndarray):
        array = value
    else:
        if not all(type(one) is int for one in value):
            index = next(i for i, one in enumerate(value) if type(one) is not int)
            if not all(_is_integral(one) for one in value):
                index = next(i for i, one in enumerate(value) if not _is_integral(one))
                raise _invalid(
                    value[index], f"{path}[{index}]", "a token id, an integer of at least 0", "invalid_type"
                )
            value = [int(one) for one in value]
        try:
            array = np.array(value, np.int64)
        except OverflowError:
            index = next(i for i, one in enumerate(value) if not -(2**63) <= one < 2**63)
            raise _invalid(value[index], f"{path}[{index}]", "a token id, an integer of at least 0") from None
    if len(array) and int(array.min()) < 0:
        index = int(np.argmax(array < 0))
        raise _invalid(int(array[index]), f"{path}[{index}]", "a token id, an integer of at least 0")
    return array
