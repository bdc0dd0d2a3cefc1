"""The first program in the README prints what the README shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no {language or 'plain'} block"
    return found[1]


def test_the_first_program_prints_what_the_readme_shows(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text(block("python"))
    command = re.search(r"^\.venv/bin/telegrad run -n (\d+) hello\.py$", README, re.MULTILINE)
    assert command is not None
    done = subprocess.run(
        [sys.executable, "-m", "telegrad.cli", "run", "-n", command[1], str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"```\n{done.stdout}```\n" in README


def test_the_first_program_is_short() -> None:
    assert len(block("python").splitlines()) <= 20


def test_the_commands_in_the_readme_exist_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"\bmake (\w+)", block("sh"))
    assert commands == ["demo", "test"]
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
