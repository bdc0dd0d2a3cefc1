"""That the benchmarks run at all; what they find is not for tests to judge."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

CALLS = Path(__file__).parents[1] / "benchmarks" / "calls.py"


def test_the_benchmark_of_calls_prints_and_writes_a_ratio(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(CALLS), "--quick", "--cases", "noop", "--blocks", "1", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    row = re.search(r"^noop .* (\d+\.\d\d) +\d+\.\d\d to \d+\.\d\d ", done.stdout, re.MULTILINE)
    assert row is not None, done.stdout
    assert float(row[1]) == round(json.loads(figures.read_text())["cases"]["noop"]["ratio"], 2)


def test_the_benchmark_of_calls_names_the_cases_when_it_does_not_know_one() -> None:
    done = subprocess.run([sys.executable, CALLS, "--cases", "nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'nope'" in done.stderr
    assert "64MB" in done.stderr
