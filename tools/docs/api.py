"""Writes the tables of docs/api.md from the table of fields: `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from mstar.validation.fields import CHAT, COMPLETION, Field, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
BEGIN, END = "<!-- generated: fields -->", "<!-- end of generated part -->"
TITLES = {CHAT: "/v1/chat/completions", COMPLETION: "/v1/completions"}


def _cells(field: Field) -> tuple[str, str, str, str]:
    origin = "" if field.openai else "beyond OpenAI's"
    note = "; ".join(part for part in (field.note, origin) if part)
    return f"`{field.name}`", field.kind.allowed, field.default, note


def _rows(endpoint: str) -> Iterator[str]:
    fields = table(endpoint).values()
    yield f"### {TITLES[endpoint]}"
    yield ""
    yield "| field | allowed | default | note |"
    yield "|---|---|---|---|"
    for field in fields:
        if field.supported:
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(field)) + " |"
    yield ""
    yield "Refused by name, unless null or at its default:"
    names = (f"`{field.name}` ({field.default})" for field in fields if not field.supported)
    yield ", ".join(names) + "."
    yield ""


def generated() -> str:
    """The part between the markers."""
    return "\n".join(["", *_rows(CHAT), *_rows(COMPLETION)])


def current(page: str) -> str:
    """What a page has between the markers; raises ValueError where they are missing."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"docs/api.md lacks the markers {BEGIN} and {END}")
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    current(page)
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{generated()}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
