"""The benchmarks run and write their files. Their results are not tested."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(300)  # torch's workers poll, which is slow on a busy machine

BENCHMARKS = ROOT / "benchmarks"
CALLS, BACKWARD, TRAINING, EVERYTHING, DRAW = (
    BENCHMARKS / f"{name}.py" for name in ("calls", "backward", "training", "everything", "draw")
)


def _check_ratios(benchmark: Path, cases: list[str], figures: Path) -> None:
    """Run these cases, and check that the table and the file have the same ratios."""
    command = [sys.executable, str(benchmark), "--quick", "--blocks", "1", "--json", str(figures), "--cases", *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(figures.read_text())["cases"]
    assert list(written) == cases
    for case in cases:
        target = r"(?: +\d+\.\d\d +(?:yes|NO))?"
        row = re.search(rf"^{case} .* (\d+\.\d\d){target} +\d+\.\d\d to \d+\.\d\d ", done.stdout, re.MULTILINE)
        assert row is not None, done.stdout
        assert float(row[1]) == round(written[case]["ratio"], 2)


def test_the_calls_benchmark_prints_and_writes_a_ratio(tmp_path: Path) -> None:
    _check_ratios(CALLS, ["noop"], tmp_path / "figures.json")


def test_the_backward_benchmark_prints_and_writes_ratios_for_two_workers_and_for_one(tmp_path: Path) -> None:
    _check_ratios(BACKWARD, ["hop1", "local"], tmp_path / "figures.json")


def test_the_training_benchmark_prints_and_writes_ratios(tmp_path: Path) -> None:
    _check_ratios(TRAINING, ["pipeline", "proxy"], tmp_path / "figures.json")


def test_everything_writes_the_figures_of_both_transports_and_a_picture(tmp_path: Path) -> None:
    figures, picture, again = (tmp_path / name for name in ("results/figures.json", "drawn.svg", "again.svg"))
    command = [sys.executable, str(EVERYTHING), "--quick", "--blocks", "1", "--cases", "noop", "1KB", "64KB"]
    done = subprocess.run(
        [*command, "--json", str(figures), "--picture", str(picture)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(figures.read_text())
    assert {"processor", "cores", "kernel", "python", "torch", "telegrad", "load"} <= written["machine"].keys()
    compared = [run for run in written["runs"] if run["program"] == "calls.py"]
    assert [run["transport"] for run in compared] == ["unix", "tcp"]
    for run in compared:
        assert list(run["cases"]) == ["noop", "1KB", "64KB"]
        assert all(case["systems"].keys() == {"torch", "telegrad", "raw socket"} for case in run["cases"].values())
    assert [run["cases"]["noop"]["targets"] for run in compared] == [{"torch": 0.25}, {"torch": 0.5}]
    ratios = {f"{run['cases'][case]['ratio']:.2f}" for run in compared for case in ("noop", "64KB")}
    shown = {words.split()[0] for words in _texts(picture) if "≤" in words}
    assert shown == ratios
    subprocess.run([sys.executable, DRAW, "--json", figures, "--picture", again], check=True, timeout=250)
    assert again.read_bytes() == picture.read_bytes()


def test_the_committed_picture_shows_the_committed_figures(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    subprocess.run([sys.executable, DRAW, "--picture", drawn], check=True, timeout=250)
    assert drawn.read_bytes() == (BENCHMARKS.parent / "docs" / "benchmarks.svg").read_bytes(), (
        "run `python benchmarks/draw.py`"
    )


def test_the_picture_says_when_its_figures_are_unreliable(tmp_path: Path) -> None:
    figures = json.loads((BENCHMARKS / "results" / "latest.json").read_text())
    for load, quick, expected in (
        ("0.1 0.1 0.1", False, []),
        ("9.0 8.0 7.0", True, ["A quick run", "The machine was busy"]),
    ):
        figures["machine"]["load"], figures["settings"]["quick"] = load, quick
        written, drawn = tmp_path / "figures.json", tmp_path / "drawn.svg"
        written.write_text(json.dumps(figures))
        subprocess.run([sys.executable, DRAW, "--json", written, "--picture", drawn], check=True, timeout=250)
        said = [words for words in _texts(drawn) if words.startswith(("A quick run", "The machine was busy"))]
        assert [words.startswith(begin) for words, begin in zip(said, expected, strict=True)] == [True] * len(expected)


def test_a_missing_optional_system_is_reported_in_one_line() -> None:
    hidden = "import sys; sys.modules.update(ray=None, zmq=None); sys.path.insert(0, sys.argv[1]); import others"
    done = subprocess.run(
        [sys.executable, "-c", f"{hidden}; others.explain_absence(); print(others.installed())", BENCHMARKS],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stdout == "[]\n", done.stderr
    assert [line.split()[1] for line in done.stderr.splitlines()] == ["Ray", "pyzmq"]


def test_the_examples_in_docstrings_of_the_benchmarks_run() -> None:
    files = [
        path.name for path in sorted(BENCHMARKS.glob("*.py")) if re.search(r"^ +>>> ", path.read_text(), re.MULTILINE)
    ]
    done = subprocess.run(
        [sys.executable, "-m", "doctest", *files],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert files
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def _texts(picture: Path) -> list[str]:
    return [text.text or "" for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_an_unknown_case_lists_the_known_ones() -> None:
    done = subprocess.run([sys.executable, CALLS, "--cases", "nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'nope'" in done.stderr
    assert "64MB" in done.stderr


def test_the_check_writes_counts_and_reports_those_that_grew(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    command = [sys.executable, str(BENCHMARKS / "check.py"), "--counts", str(counts), "--cases", "noop"]
    done = subprocess.run([*command, "--update"], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(counts.read_text())
    caller = written["cases"]["noop"]["caller"]
    assert caller["system calls"] >= 3
    assert caller["wake-ups of threads"] < 0.5
    # Only this count can exceed its limit: on a busy machine, the second run may do more work of another kind.
    functions = caller["Python functions"]
    for counts_of_side in written["cases"]["noop"].values():
        counts_of_side.update((kind, 1000.0 + 2 * count) for kind, count in counts_of_side.items())
    caller["Python functions"] = functions / 2
    counts.write_text(json.dumps(written))
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (worse,) = re.findall(r"^.*WORSE.*$", done.stdout, re.MULTILINE)
    assert worse.startswith("noop  caller  Python functions")


_DYING = """
import os, sys
from pathlib import Path
import command, measure, pairs

class Nothing:
    def shutdown(self):
        pass

class Mortal(Nothing):
    pass

def prepare(joined):
    if isinstance(joined, Mortal):
        try:
            Path(sys.argv[2]).touch(exist_ok=False)
            os._exit(3)
        except FileExistsError:
            pass
    return lambda: None

systems = {name: pairs.System(lambda place: Nothing(), (pairs.CALLER,)) for name in (pairs.TORCH, pairs.TELEGRAD)}
systems[sys.argv[1]] = pairs.System(lambda place: Mortal(), (pairs.CALLER,))
turns = lambda ready, case, number: {name: (workers, case) for name, workers in ready.items()}
cases = {"case": pairs.Case("nothing", 3, prepare)}
report = command.Benchmark("dying.py", "", cases, systems, turns).measure("unix", ["case"], 2, False)
print(report.settings["rounds"], report.comparisons[0].baseline.count(), report.comparisons[0].candidate.count())
"""


def _with_one_death(system: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _DYING, system, str(directory / "died")]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, cwd=BENCHMARKS)


def test_a_round_in_which_torch_dies_is_repeated_and_counted_once(tmp_path: Path) -> None:
    done = _with_one_death("torch", tmp_path)
    assert done.stdout == "2 6 6\n", done.stderr
    assert "repeating the round: the caller of torch died, with exit code 3" in done.stderr


def test_a_run_in_which_telegrad_dies_fails(tmp_path: Path) -> None:
    done = _with_one_death("telegrad", tmp_path)
    assert done.returncode != 0
    assert "the caller of telegrad died, with exit code 3" in done.stderr
