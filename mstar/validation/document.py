"""The page about API fields, written from the table: `python -m mstar.validation.document [--check] FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from mstar.validation.fields import CHAT, COMPLETION, FIELDS, Field

__all__ = ["page"]

_ROUTES = {CHAT: "/v1/chat/completions", COMPLETION: "/v1/completions"}
_HEAD = """# Fields of the API

This page is generated from the table in `mstar/validation/fields.py` (`python -m mstar.validation.document`).

`null` stands for a field that is left out, whatever the field. Integers may be written as integral floats;
booleans are no numbers. A field that stands in neither table of its endpoint is refused by name with status
400, like a value outside of its range.

Sampling defaults come from the request, then from the model's generation_config.json, then from OpenAI's API.
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD]
    for endpoint, route in _ROUTES.items():
        fields = [field for field in FIELDS if endpoint in field.endpoints]
        parts.append(f"\n## {route}\n\n")
        parts.append("| field | allowed | default | notes |\n|---|---|---|---|\n")
        parts.extend(_row(field) for field in fields if field.supported)
        parts.append(
            "\nKnown to OpenAI's API and not honoured here; accepted only as null or at the value shown:\n\n"
        )
        parts.append("| field | accepted |\n|---|---|\n")
        parts.extend(
            f"| `{field.name}` | {_code(field.default)} |\n" for field in fields if not field.supported
        )
    return "".join(parts)


def _row(field: Field) -> str:
    notes = [field.note] if field.note else []
    if not field.openai:
        notes.append("not in OpenAI's API")
    return f"| `{field.name}` | {field.kind.allowed} | {field.default} | {'; '.join(notes)} |\n"


def _code(default: str) -> str:
    return "null" if default == "null" else f"null, `{default}`"


def main(arguments: list[str]) -> int:
    """Write the page, or with --check only say whether the file holds it."""
    check = "--check" in arguments
    names = [argument for argument in arguments if argument != "--check"]
    target = Path(names[0] if names else "docs/api-fields.md")
    text = page()
    if not check:
        target.write_text(text, encoding="utf-8")
        return 0
    if target.exists() and target.read_text(encoding="utf-8") == text:
        return 0
    print(
        f"{target} is not what the table says; run: python -m mstar.validation.document {target}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
