"""Sections and files that the docs refer to exist, so that a page cannot keep a name that the code has dropped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.paths import ROOT

PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
FOLDERS = [ROOT / name for name in ("src", "tests", "docs", "examples", "benchmarks", "conformance", "fuzz")]
FILES = [*ROOT.glob("*.*"), *(file for folder in FOLDERS for file in folder.rglob("*.*"))]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_linked_sections_exist(page: Path) -> None:
    for target, section in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
        if not target.startswith("https://"):
            linked = page.parent / target if target else page
            assert section in anchors(linked), f"{page.name} links to {target}#{section}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_named_on_a_page_exist(page: Path) -> None:
    for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|toml))`", page.read_text()):
        assert any(f"/{file}".endswith(f"/{name}") for file in FILES), f"{page.name} names {name}"
