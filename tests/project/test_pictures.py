"""The pictures in the docs are up to date, and each is used on a page."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    for name in ("pictures", "drawing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("pictures")


def test_the_committed_pictures_are_up_to_date(pictures: ModuleType, tmp_path: Path) -> None:
    pictures.draw_all(tmp_path)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in (DOCS / "pictures").glob("*.svg")}
    assert drawn == committed, "run `python docs/pictures.py`"


def test_every_picture_is_on_the_page_about_the_backward_pass(pictures: ModuleType) -> None:
    page = (DOCS / "backward.md").read_text()
    for picture in pictures.PICTURES:
        assert f"](pictures/{picture.__name__}.svg)" in page


def test_every_screenshot_is_small_and_on_a_page() -> None:
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    for path in (DOCS / "pictures").glob("*.png"):
        assert f"](pictures/{path.name})" in pages, f"{path.name} is on no page"
        assert path.stat().st_size < 300_000, f"{path.name} is too large: {path.stat().st_size} bytes"


def test_all_text_is_inside_its_picture(pictures: ModuleType) -> None:
    for draw in pictures.PICTURES:
        picture = draw()
        for text in ElementTree.fromstring(picture.svg()).iter(f"{SVG}text"):
            words, x, size = text.text or "", float(text.attrib["x"]), float(text.attrib["font-size"])
            width = len(words) * size * 0.62  # a generous average for these fonts
            left = {"start": x, "middle": x - width / 2, "end": x - width}[text.attrib["text-anchor"]]
            assert left >= 0, f"{draw.__name__}: {words!r}"
            assert left + width <= picture.width, f"{draw.__name__}: {words!r}"
            assert 0 < float(text.attrib["y"]) < picture.height, f"{draw.__name__}: {words!r}"
