"""Every example runs as it is, and says nothing on standard error."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@cache
def run(example: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_without_a_warning(example: Path) -> None:
    done = run(example)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_model_that_is_split_over_two_workers_learns() -> None:
    losses = re.findall(
        r"^step .* loss ([0-9.]+)$", run(EXAMPLES[0].with_name("split_training.py")).stdout, re.MULTILINE
    )
    assert float(losses[-1]) < 0.01 * float(losses[0])


def test_the_demo_tells_of_all_that_it_shows() -> None:
    lines = run(EXAMPLES[0].with_name("demo.py")).stdout.splitlines()
    told = "\n".join(line for line in lines if " ms   " in line)
    for word in (
        "hello alice",
        "in flight",
        "the result is right: True",
        "bob > carol > dave",
        "DeadlineExceeded",
        "all_gather",
    ):
        assert word in told
    assert "ZeroDivisionError: division by zero" in "\n".join(lines)
    assert lines[-1].startswith("Done in ")
