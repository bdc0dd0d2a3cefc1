"""Every example runs as it is, or by the command that it names, and says nothing on standard error."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


LIKE_ONE_PROCESS = ["actor_learner", "encoder_decoder", "parameter_server", "pipeline"]


@cache
def run(example: Path) -> subprocess.CompletedProcess[str]:
    command = re.search(r"^    telegrad (run .*) examples/", example.read_text(), re.MULTILINE)
    words = ["-m", "telegrad.cli", *command[1].split()] if command is not None else []
    return subprocess.run(
        [sys.executable, *words, str(example)], capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_without_a_warning(example: Path) -> None:
    done = run(example)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("name", LIKE_ONE_PROCESS)
def test_an_example_trains_step_for_step_like_one_process(name: str) -> None:
    said = run(EXAMPLES[0].with_name(f"{name}.py")).stdout
    difference = re.search(r"largest difference to one process: (\S+)", said)
    assert difference is not None, said
    assert float(difference[1]) < 1e-9


@pytest.mark.parametrize("name", LIKE_ONE_PROCESS)
def test_an_example_of_training_is_short(name: str) -> None:
    assert len(EXAMPLES[0].with_name(f"{name}.py").read_text().splitlines()) < 100


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
