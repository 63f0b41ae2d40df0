"""The page about API fields is the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar.validation.document import main, page
from mstar.validation.fields import FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "api-fields.md"


@pytest.mark.behaviour("F-27")
def test_the_page_in_the_repository_is_what_the_table_says() -> None:
    assert main(["--check", str(PAGE)]) == 0, "run: python -m mstar.validation.document docs/api-fields.md"


@pytest.mark.behaviour("F-27")
def test_every_field_stands_on_the_page() -> None:
    text = page()
    for field in FIELDS:
        assert text.count(f"| `{field.name}` |") == len(
            [f for f in FIELDS if f.name == field.name for _ in f.endpoints]
        )


def test_an_outdated_page_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "fields.md"
    assert main([str(target)]) == 0
    assert main(["--check", str(target)]) == 0
    target.write_text("old")
    assert main(["--check", str(target)]) == 1
    assert "python -m mstar.validation.document" in capsys.readouterr().err
