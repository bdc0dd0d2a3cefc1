"""The docs are correct: their programs run, their links work, and their tables are complete.

A block marked ``python run`` runs in this process, as worker0 of a group with worker1. All such blocks of a page share
a namespace. The workers have simulated devices if the page says how to install them. A block marked ``python program``
is a whole program, run by ``telegrad run -n 2``, or by itself if it launches its own workers.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from pathlib import Path

import pytest
from tests.support.loaded_interpreter import run_loaded
from tests.support.paths import ROOT
from tests.support.processes import unexpected_errors

from telegrad import errors
from telegrad.autograd import backward
from telegrad.default_agent import acting_as
from telegrad.doctor.settings_checks import VARIABLES
from telegrad.options import Options
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.peer_limits import PeerLimits
from telegrad.testing.group import local_group
from telegrad.wire.frames import Limits

PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL_PAGES = [*PAGES, *sorted(ROOT.glob("*.md"))]
_BLOCK = re.compile(r"^```python (run|program)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)[^)]*\)")


def blocks(page: Path, kind: str) -> list[str]:
    """Return the blocks of a kind, padded so that errors show the line number of the page."""
    text = page.read_text()
    return ["\n" * text[: match.start(2)].count("\n") + match[2] for match in _BLOCK.finditer(text) if match[1] == kind]


def rows(page: str, heading: str) -> set[str]:
    """Return the names in backquotes in the first column of the table below a heading."""
    section = (ROOT / "docs" / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    first = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in first for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "run")], ids=lambda page: page.stem)
def test_the_snippets_of_a_page_run(
    page: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "accelerator.install()" in page.read_text():
        request.getfixturevalue("sim")
    module = types.ModuleType(f"docs_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # functions are pickled by name
    with local_group(["worker0", "worker1"]) as agents, acting_as(agents["worker0"]):
        for block in blocks(page, "run"):
            exec(compile(block, page, "exec"), module.__dict__)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "program")], ids=lambda page: page.stem)
def test_the_programs_of_a_page_run(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for block in blocks(page, "program"):
        if "accelerator.install()" in block:
            request.getfixturevalue("sim")
        script = tmp_path / "program.py"
        script.write_text(block)
        start = [] if "launch" in block else ["-m", "telegrad.cli", "run", "-n", "2"]
        done = run_loaded([sys.executable, *start, str(script)], timeout=60)
        assert (done.returncode, unexpected_errors(done.stderr)) == (0, "")


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.stem)
def test_links_point_to_existing_files(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tables_list_exactly_the_settings() -> None:
    for heading, settings in (
        ("Options", Options),
        ("Session", SessionSettings),
        ("Limits", Limits),
        ("Peer limits", PeerLimits),
    ):
        assert rows("settings.md", heading) == {field.name for field in dataclasses.fields(settings)}


def test_the_table_lists_exactly_the_environment_variables_that_are_read() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    ours = set(re.findall(r"\bTELEGRAD_[A-Z_]+\b", sources))
    documented = rows("settings.md", "Environment")
    assert ours == {name for name in documented if name.startswith("TELEGRAD_")}
    assert ours == VARIABLES  # the doctor warns of others
    for name in documented:
        assert name in sources, f"{name} is documented, but nothing reads it"


def test_the_errors_in_the_table_exist() -> None:
    for name in rows("calls.md", "Errors"):
        found = getattr(errors, name, None) or getattr(__import__("builtins"), name)
        assert issubclass(found, Exception)


def test_every_argument_of_backward_is_in_the_table() -> None:
    assert rows("autograd.md", "backward") >= set(inspect.signature(backward).parameters)


def test_no_line_of_a_page_is_too_long_to_review() -> None:
    for page in ALL_PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            assert len(line) <= 130 or line.startswith("|"), f"{page.name}:{number}"
