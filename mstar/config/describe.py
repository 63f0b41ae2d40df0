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
from mstar.config.schema import Deployment, NodeGroup
from mstar.config.size import format_size

__all__ = ["allowed", "describe", "field_types", "leaves", "reference", "words"]

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
        return f" greater than {above:g}" + (f", at most {high:g}" if high is not None else "")
    return ""


def words(kind: inspect.Type, none: str = "unset") -> str:
    """What a value of this type may be; ``none`` is how None is called."""
    match kind:
        case inspect.Metadata():
            return words(kind.type, none)
        case inspect.IntType():
            return "a whole number" + _bounds(kind.ge, kind.gt, kind.le)
        case inspect.FloatType():
            return "a number" + _bounds(kind.ge, kind.gt, kind.le)
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType():
            names = ", ".join(str(value) for value in kind.values)
            return f"one of {names}" if len(kind.values) > 1 else names
        case inspect.UnionType():
            parts = (part for part in kind.types if not isinstance(part, inspect.NoneType))
            return " or ".join(words(part, "null") for part in parts) + (
                f" (or {none})" if kind.includes_none else ""
            )
        case inspect.DictType():
            return "a mapping"
        case inspect.StructType():
            return "a mapping with the keys " + ", ".join(field.encode_name for field in kind.fields)
        case inspect.VarTupleType(item_type=inspect.StructType() as item):
            return f"a list, each {words(item)}"
        case inspect.VarTupleType(item_type=inspect.StrType()):
            return "a list of texts"
        case inspect.VarTupleType():
            return f"a list, each {words(kind.item_type)}"
        case _:
            return "a text"


def allowed(path: str) -> str:
    """What a setting may be, in words: "a whole number from 0 to 2"."""
    text = words(inspect.type_info(field_types()[path]))
    return f"{text}; units such as MiB and GiB may follow" if option(path).size else text


def _plain(value: Any) -> str:
    if value is None:
        return "off"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key}: {{{_plain(part)}}}" if isinstance(part, Mapping) else f"{key}: {_plain(part)}"
            for key, part in value.items()
        )
    return str(value)


def _group(group: NodeGroup) -> str:
    parts = [", ".join(group.node_names) or "the other nodes"]
    if group.ranks:
        parts.append(f"on ranks {', '.join(map(str, group.ranks))}")
    sizes = (("tp", group.tp_size), ("sp", group.sp_size))
    parts.extend(f"{name} {size}" for name, size in sizes if size is not None and size > 1)
    if group.graph_walks:
        parts.append(f"in {', '.join(group.graph_walks)}")
    return " ".join(parts)


def _shown(path: str, value: Any) -> str:
    if value is None:
        return "unset"
    if path == "node_groups":
        return "; ".join(map(_group, value)) or "one group"
    if isinstance(value, Mapping):
        return _plain(value)
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
            ", ".join(f"`{flag}`" for flag in entry.flags) or "in files only",
            f"`{entry.variable}`" if entry.variable else "",
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
