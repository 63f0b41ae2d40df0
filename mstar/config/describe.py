"""Settings in words: what is allowed for each, the table of the documentation, the resolved configuration.

``python -m mstar.config.describe`` prints the generated part of docs/configuration.md;
with ``--write FILE`` it puts it between the markers of that file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect
from msgspec.structs import FieldInfo

from mstar.config.options import OPTIONS, OTHER_VARIABLES, option
from mstar.config.schema import Deployment
from mstar.config.size import format_size

__all__ = ["allowed", "describe", "field_types", "leaves", "reference"]

BEGIN, END = "<!-- generated: settings -->", "<!-- end of generated part -->"


def _fields(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _fields(field.type, f"{prefix}{field.encode_name}.")
        else:
            yield f"{prefix}{field.encode_name}", field


def field_types() -> dict[str, Any]:
    """The annotated type of every setting, by dotted path, in the order of the schema."""
    return {path: field.type for path, field in _fields(Deployment)}


def leaves(deployment: Deployment) -> dict[str, Any]:
    """Every value of ``deployment`` by dotted path."""
    values: dict[str, Any] = {}
    for path in field_types():
        value: Any = deployment
        for part in path.split("."):
            value = getattr(value, part)
        values[path] = value
    return values


def _bounds(low: float | None, above: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low:g}"
    if above is not None:
        return f" greater than {above:g}"
    return ""


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return _words(kind.type)
        case inspect.IntType():
            return "a whole number" + _bounds(kind.ge, kind.gt, kind.le)
        case inspect.FloatType():
            return "a number" + _bounds(kind.ge, kind.gt, kind.le)
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in kind.values)
        case inspect.UnionType():
            return " or ".join(
                _words(part) for part in kind.types if not isinstance(part, inspect.NoneType)
            ) + (" (or unset)" if kind.includes_none else "")
        case inspect.VarTupleType():
            return "a list of texts"
        case _:
            return "a text"


def allowed(path: str) -> str:
    """What a setting may be, in words: "a whole number from 0 to 2"."""
    words = _words(inspect.type_info(field_types()[path]))
    return f"{words}; units such as MiB and GiB may follow" if option(path).size else words


def _shown(path: str, value: Any) -> str:
    if value is None:
        return "unset"
    if path == "listen.api_keys":
        return f"{len(value)} hidden" if value else "none"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return format_size(value) if option(path).size else str(value)


def describe(deployment: Deployment, sources: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Rows (path, value, where the value came from) for every setting. API keys are counted, never shown."""
    return [(path, _shown(path, value), sources[path]) for path, value in leaves(deployment).items()]


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body]


def reference() -> str:
    """The tables of docs/configuration.md, from the schema and the table of options."""
    defaults = leaves(Deployment())
    settings = [("key in the file", "flag", "environment", "default", "allowed", "what it sets")]
    settings.extend(
        (
            f"`{entry.path}`",
            ", ".join(f"`{flag}`" for flag in entry.flags),
            f"`{entry.variable}`",
            _shown(entry.path, defaults[entry.path]),
            allowed(entry.path),
            entry.help,
        )
        for entry in OPTIONS
    )
    others = [("variable", "what it sets"), *((f"`{name}`", text) for name, text in OTHER_VARIABLES)]
    return "\n".join([*_markdown(settings), "", "Variables that are not settings:", "", *_markdown(others)])


def main(arguments: Sequence[str]) -> int:
    """Print the generated part, or write it into the file after ``--write``."""
    if len(arguments) == 2 and arguments[0] == "--write":
        path = Path(arguments[1])
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        path.write_text(f"{before}{BEGIN}\n{reference()}\n{END}{after}", encoding="utf-8")
    else:
        print(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
