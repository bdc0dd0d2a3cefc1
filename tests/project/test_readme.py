"""The first program in the README prints what the README shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.loaded_interpreter import run_loaded
from tests.support.paths import ROOT
from tests.support.processes import unexpected_errors

README = (ROOT / "README.md").read_text()


def block(language: str, number: int = 0) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(found) > number, f"the README has no {language or 'plain'} block {number}"
    return str(found[number])


def test_the_first_program_prints_what_the_readme_shows(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text(block("python"))
    command = re.search(r"^\.venv/bin/telegrad run -n (\d+) hello\.py$", README, re.MULTILINE)
    assert command is not None
    done = run_loaded(
        [sys.executable, "-m", "telegrad.cli", "run", "-n", command[1], str(script)],
        timeout=60,
    )
    assert (done.returncode, unexpected_errors(done.stderr)) == (0, "")
    assert f"```\n{done.stdout}```\n" in README


def test_the_program_that_starts_its_own_workers_runs(tmp_path: Path) -> None:
    program = block("python", 1)
    assert len([line for line in program.splitlines() if line]) <= 20
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, str(tmp_path / "train.py")]
    done = run_loaded(command, timeout=100)
    assert (done.returncode, unexpected_errors(done.stderr)) == (0, "")
    assert 0 < float(done.stdout) < 1
    assert "with launch.start(train, workers=4) as group:" in program


def test_the_first_program_is_short() -> None:
    assert len(block("python").splitlines()) <= 20


def test_the_commands_in_the_readme_exist_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"\bmake (\w+)", block("sh"))
    assert commands == ["demo", "test"]
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_every_page_of_the_docs_is_linked() -> None:
    assert [page.name for page in sorted(ROOT.glob("docs/*.md")) if f"](docs/{page.name}" not in README] == []
