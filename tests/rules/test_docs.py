"""The documents agree with the code and with each other."""

from __future__ import annotations

import re

import pytest

from tests.rules.sources import ROOT, text, tracked

PAGES = [name for name in tracked() if name.endswith(".md")]
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)\b")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page: str) -> None:
    folder = (ROOT / page).parent
    links = [link for link in LINK.findall(text(page)) if "://" not in link]
    assert [link for link in links if not (folder / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_that_is_told_exists(page: str) -> None:
    # Only where it is typed: in a code span or block.
    code = " ".join(re.findall(r"`[^`]+`|```.*?```", text(page), re.DOTALL))
    targets = set(re.findall(r"^([a-z][a-z-]*):", text("Makefile"), re.MULTILINE))
    assert set(TARGET.findall(code)) - targets == set()
