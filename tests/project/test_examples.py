"""Every example runs by itself or with the command in its docstring, and prints nothing to stderr."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from tests.support.loaded_interpreter import run_loaded
from tests.support.paths import ROOT
from tests.support.processes import unexpected_errors

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if not path.stem.startswith("ray_"))
"""Without those that need Ray: tests/behaviour/ray runs them."""


LOSSES = re.compile(
    r"^(?:worker '\w+' lost worker 'stage\d'|the training lost workers? 'stage|the training goes on with step \d+"
    r"|telegrad launch: stage\d was killed by SIGKILL).*\n",
    re.MULTILINE,
)
"""What is logged when a stage of the recovery example is killed, and replaced."""
LIKE_ONE_PROCESS = ["actor_learner", "encoder_decoder", "parameter_server", "pipeline"]


@cache
def run(example: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = re.search(r"^    telegrad (run .*) examples/", example.read_text(), re.MULTILINE)
    words = ["-m", "telegrad.cli", *command[1].split()] if command is not None else []
    return run_loaded([sys.executable, *words, str(example), *arguments], timeout=110)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_without_a_warning(example: Path) -> None:
    done = run(example)
    said = unexpected_errors(done.stderr)
    if example.stem == "recovery":  # kills workers if the training takes long enough, which is logged
        said = LOSSES.sub("", said)
    assert (done.returncode, said) == (0, ""), done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", [*LIKE_ONE_PROCESS, "split_learning"])
def test_an_example_trains_step_for_step_like_one_process(name: str) -> None:
    output = run(EXAMPLES[0].with_name(f"{name}.py")).stdout
    difference = re.search(r"largest difference to one process: (\S+)", output)
    assert difference is not None, output
    assert float(difference[1]) < 1e-9


@pytest.mark.parametrize("name", LIKE_ONE_PROCESS)
def test_a_training_example_is_short(name: str) -> None:
    assert len(EXAMPLES[0].with_name(f"{name}.py").read_text().splitlines()) < 100


def test_a_model_split_over_two_workers_learns() -> None:
    losses = re.findall(
        r"^step .* loss ([0-9.]+)$", run(EXAMPLES[0].with_name("split_training.py")).stdout, re.MULTILINE
    )
    assert float(losses[-1]) < 0.01 * float(losses[0])


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("name", ["demo", "split_training"])
def test_the_losses_on_devices_are_those_on_the_cpu(name: str) -> None:
    example = EXAMPLES[0].with_name(f"{name}.py")
    on_devices = run(example, "--device", "sim")
    assert (on_devices.returncode, unexpected_errors(on_devices.stderr)) == (0, "")
    found, wanted = (
        re.findall(r"^step .* loss ([0-9.]+)", output, re.MULTILINE)
        for output in (on_devices.stdout, run(example).stdout)
    )
    assert len(wanted) >= 5
    assert found == wanted


def test_neither_party_of_split_learning_gets_what_the_other_does_not_expose() -> None:
    output = run(EXAMPLES[0].with_name("split_learning.py")).stdout
    assert len(re.findall(r"is not exposed to worker '(?:lab|hospital)'\.$", output, re.MULTILINE)) == 3
    first, last = re.findall(r"from (\S+) to (\S+)\. ", output)[0]
    assert float(last) < 0.7 * float(first)


def test_the_demo_trains_like_one_process() -> None:
    output = run(EXAMPLES[0].with_name("demo.py")).stdout
    difference = re.search(r"differ by (\S+) at most", output)
    assert difference is not None, output
    assert float(difference[1]) < 1e-9
    first, last, right = re.findall(r"from (\S+) to (\S+), (\d+)%", output)[0]
    assert float(last) < float(first) / 4
    assert int(right) > 80
    assert output.splitlines()[-1].startswith("Done in ")


def test_the_readme_shows_the_output_of_the_demo_except_for_numbers() -> None:
    def words(text: str) -> str:
        return re.sub(r"[\s\d.]+(e[-+]\d+)?", " ", text)

    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"^```\n(A transformer.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert words(shown[1]) == words(run(EXAMPLES[0].with_name("demo.py")).stdout)
