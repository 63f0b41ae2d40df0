"""Where in a nested value a setting is wrong: the path of the part, the part, and what is allowed there."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from mstar.config.describe import words

__all__ = ["Blame", "UnknownKey", "blame"]


class UnknownKey(NamedTuple):
    """A key that no setting has, and the ones allowed beside it."""

    path: str
    allowed: tuple[str, ...]

    @property
    def hint(self) -> str:
        """A question that ends the sentence, or nothing."""
        close = difflib.get_close_matches(self.path.rpartition(".")[2], self.allowed, n=1)
        return f" Did you mean {close[0]}?" if close else ""


class Blame(NamedTuple):
    """A part of a value that its type does not allow, and what it does allow in words."""

    path: str
    value: Any
    allowed: str


def blame(path: str, raw: Any, kind: Any) -> Blame | UnknownKey:
    """The innermost part of ``raw`` that is not a ``kind`` (an annotation as msgspec reads it).

    ``raw`` must not be convertible to ``kind``; ``path`` is where it stands.
    """
    for inner, value, expected in _parts(path, raw, kind):
        if isinstance(value, UnknownKey):
            return value
        if not _fits(value, expected):
            return blame(inner, value, expected)
    none = "unset" if "." not in path and "[" not in path else "null"
    return Blame(path, raw, words(inspect.type_info(kind), none))


def _parts(path: str, raw: Any, kind: Any) -> list[tuple[str, Any, Any]]:
    """The parts of ``raw`` with their paths and types, where ``kind`` has a form for such a value."""
    for form in _forms(kind):
        origin, arguments = typing.get_origin(form), typing.get_args(form)
        if origin is dict and isinstance(raw, dict):
            keys = [(f"a key of {path}", key, str) for key in raw]
            return keys + [(f"{path}.{key}", value, arguments[1]) for key, value in raw.items()]
        if origin is tuple and isinstance(raw, list | tuple):
            return [(f"{path}[{at}]", value, arguments[0]) for at, value in enumerate(raw)]
        if isinstance(form, type) and issubclass(form, msgspec.Struct) and isinstance(raw, dict):
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(form)}
            return [
                (f"{path}.{key}", value, fields[key])
                if key in fields
                else (path, UnknownKey(f"{path}.{key}", tuple(fields)), None)
                for key, value in raw.items()
            ]
    return []


def _forms(kind: Any) -> list[Any]:
    if typing.get_origin(kind) is typing.Annotated:
        return _forms(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [form for part in typing.get_args(kind) for form in _forms(part)]
    return [kind]


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True
