"""That the benchmarks run at all; what they find is not for tests to judge."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CALLS, BACKWARD, TRAINING = (BENCHMARKS / f"{name}.py" for name in ("calls", "backward", "training"))


def _check_ratios(benchmark: Path, cases: list[str], figures: Path) -> None:
    """Run these cases, and find in table and file the same ratio of each."""
    command = [sys.executable, str(benchmark), "--quick", "--blocks", "1", "--json", str(figures), "--cases", *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(figures.read_text())["cases"]
    assert list(written) == cases
    for case in cases:
        row = re.search(rf"^{case} .* (\d+\.\d\d) +\d+\.\d\d to \d+\.\d\d ", done.stdout, re.MULTILINE)
        assert row is not None, done.stdout
        assert float(row[1]) == round(written[case]["ratio"], 2)


def test_the_benchmark_of_calls_prints_and_writes_a_ratio(tmp_path: Path) -> None:
    _check_ratios(CALLS, ["noop"], tmp_path / "figures.json")


def test_the_benchmark_of_backward_prints_and_writes_a_ratio_over_two_workers_and_on_one(tmp_path: Path) -> None:
    _check_ratios(BACKWARD, ["hop1", "local"], tmp_path / "figures.json")


def test_the_benchmark_of_training_prints_and_writes_a_ratio(tmp_path: Path) -> None:
    _check_ratios(TRAINING, ["pipeline", "proxy"], tmp_path / "figures.json")


def test_the_benchmark_of_calls_names_the_cases_when_it_does_not_know_one() -> None:
    done = subprocess.run([sys.executable, CALLS, "--cases", "nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'nope'" in done.stderr
    assert "64MB" in done.stderr


def test_the_check_counts_writes_and_finds_its_own_counts_again(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    command = [sys.executable, str(BENCHMARKS / "check.py"), "--counts", str(counts), "--cases", "noop"]
    done = subprocess.run([*command, "--update"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(counts.read_text())
    caller = written["cases"]["noop"]["caller"]
    assert caller["system calls"] >= 3
    assert caller["wake-ups of threads"] < 0.5
    caller["Python functions"] /= 2
    counts.write_text(json.dumps(written))
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (worse,) = re.findall(r"^.*WORSE.*$", done.stdout, re.MULTILINE)
    assert worse.startswith("noop  caller  Python functions")
