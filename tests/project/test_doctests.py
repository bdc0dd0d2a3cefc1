"""The examples in docstrings are collected, and run."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.paths import ROOT

SKIPPED = {"src/telegrad/drop_in/__init__.py": "installing the drop-in would replace torch's modules in this process"}


def test_pytest_collects_every_file_that_has_an_example() -> None:
    with_examples = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"^\s*>>> ", path.read_text(), re.MULTILINE)
    }
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-qq", "src"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert set(re.findall(r"^(\S+): \d+$", collected.stdout, re.MULTILINE)) == with_examples


def test_examples_run_and_are_not_skipped() -> None:
    skipping = {str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.py") if "+SKIP" in path.read_text()}
    assert skipping == set(SKIPPED), "an example that cannot run needs a reason in SKIPPED"
