"""The benchmarks run and write their files. Their results are not tested."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.support.loaded_interpreter import run_loaded
from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(300)  # torch's workers poll, which is slow on a busy machine

BENCHMARKS = ROOT / "benchmarks"
CALLS, BACKWARD, TRAINING, EVERYTHING, DRAW, COMPARE = (
    BENCHMARKS / f"{name}.py" for name in ("calls", "backward", "training", "everything", "draw", "compare")
)


def _check_ratios(benchmark: Path, cases: list[str], figures: Path) -> None:
    """Run these cases, and check that the table and the file have the same ratios."""
    command = [sys.executable, str(benchmark), "--quick", "--blocks", "1", "--json", str(figures), "--cases", *cases]
    done = run_loaded(command, timeout=250)
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
    done = run_loaded([*command, "--json", str(figures), "--picture", str(picture)], timeout=250)
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
    for transport in ("unix", "tcp"):  # a quick run says nothing about the bound, only that it is compared
        assert written["events"][transport].keys() == {"noop"}
        ratio = written["events"][transport]["noop"]["ratio"]
        answer = "yes" if ratio <= 1.03 else "NO"
        assert re.search(rf"^{transport} +off .*\nnoop .* {ratio:.3f} +1\.03 +{answer} ", done.stdout, re.MULTILINE)
    subprocess.run([sys.executable, DRAW, "--json", figures, "--picture", again], check=True, timeout=250)
    assert again.read_bytes() == picture.read_bytes()


@pytest.mark.parametrize(("program", "picture"), [("draw.py", "benchmarks.svg"), ("draw_growth.py", "growth.svg")])
def test_the_committed_picture_shows_the_committed_figures(program: str, picture: str, tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    subprocess.run([sys.executable, BENCHMARKS / program, "--picture", drawn], check=True, timeout=250)
    assert drawn.read_bytes() == (ROOT / "docs" / picture).read_bytes(), f"run `python benchmarks/{program}`"


def test_the_committed_picture_of_scaling_shows_the_committed_figures(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    subprocess.run([sys.executable, BENCHMARKS / "draw_scaling.py", "--picture", drawn], check=True, timeout=250)
    committed = BENCHMARKS.parent / "docs" / "scaling.svg"
    assert drawn.read_bytes() == committed.read_bytes(), "run `python benchmarks/draw_scaling.py`"
    assert "](scaling.svg)" in (BENCHMARKS.parent / "docs" / "scaling.md").read_text()


def test_simulated_scaling_runs_at_a_small_size(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ["--workers", "--agents", "3", "--rules", "40", "--json", str(figures)]
    done = run_loaded([sys.executable, str(BENCHMARKS / "scaling.py"), *sizes], timeout=250)
    assert done.returncode == 0, done.stderr
    assert json.loads(figures.read_text())["simulated"]["rules"]["40"]["shutdown, messages"] > 4


def test_the_committed_figures_of_scaling_keep_their_bound() -> None:
    simulated = json.loads((BENCHMARKS / "results" / "scaling.json").read_text())["simulated"]
    for table, name, most in (
        ("init", "CPU ms", "10000"),
        ("init", "close, CPU ms", "10000"),
        ("rules", "shutdown, CPU ms", "10000"),
        ("departures", "CPU ms", "3000"),
    ):
        assert simulated[table][most][name] <= 3 * simulated[table]["100"][name], f"{table}: {name}"


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
    program = f"{hidden}; others.explain_absence(); print(others.installed())"
    done = run_loaded([sys.executable, "-c", program, BENCHMARKS], timeout=250)
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
    done = run_loaded([sys.executable, CALLS, "--cases", "nope"], timeout=250)
    assert done.returncode == 2
    assert "'nope'" in done.stderr
    assert "64MB" in done.stderr


def test_the_check_writes_counts_and_reports_those_that_grew(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    command = [sys.executable, str(BENCHMARKS / "check.py"), "--counts", str(counts), "--cases", "noop"]
    done = run_loaded([*command, "--update"], timeout=250)
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
    done = run_loaded(command, timeout=250)
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
    return run_loaded(command, timeout=250, cwd=BENCHMARKS)


def test_a_round_in_which_torch_dies_is_repeated_and_counted_once(tmp_path: Path) -> None:
    done = _with_one_death("torch", tmp_path)
    assert done.stdout == "2 6 6\n", done.stderr
    assert "repeating the round: the caller of torch died, with exit code 3" in done.stderr


def test_a_run_in_which_telegrad_dies_fails(tmp_path: Path) -> None:
    done = _with_one_death("telegrad", tmp_path)
    assert done.returncode != 0
    assert "the caller of telegrad died, with exit code 3" in done.stderr


def _compare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    quick = ["--quick", "--blocks", "1", "--rounds", "1", "--transports", "unix", "--cases", "noop"]
    return run_loaded([sys.executable, COMPARE, *arguments, *quick], timeout=250)


def test_compare_measures_both_trees_and_torch(tmp_path: Path) -> None:
    slow, figures = tmp_path / "slow", tmp_path / "figures.json"
    shutil.copytree(ROOT / "src", slow / "src", ignore=shutil.ignore_patterns("__pycache__"))
    client = slow / "src" / "telegrad" / "calls" / "client.py"
    client.write_text(client.read_text() + _SLOWED)
    done = _compare(slow, ROOT, "--json", figures)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(figures.read_text())["cases"].values()
    assert case["medians"].keys() == {"torch", "old", "new"}
    assert case["medians"]["old"] > 0.1 > case["medians"]["new"]
    (row,) = re.findall(r"^\| calls noop, unix \| .*$", done.stdout, re.MULTILINE)
    _, _, torch, _, new, ratio, spread, difference, to_torch, _ = (cell.strip() for cell in row.split("|"))
    assert int(new.replace(",", "")) == round(case["medians"]["new"] * 1e6)
    assert float(ratio) == round(case["new/old"][0], 2)
    assert float(to_torch) == round(case["new/torch"][0], 2)
    assert (spread, difference) == (f"{ratio} to {ratio}", "")
    assert int(torch.replace(",", "")) > 0
    assert "fewer than 7 rounds" in done.stdout


_SLOWED = """

def _slowed(begin):
    def slowly(*args, **options):
        import time

        time.sleep(0.1)
        return begin(*args, **options)

    return slowly


Client.begin = _slowed(Client.begin)
"""


def test_compare_says_which_tree_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "src" / "telegrad").mkdir(parents=True)
    (tmp_path / "src" / "telegrad" / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    done = _compare(tmp_path, tmp_path)
    assert done.returncode == 1
    assert "broken on purpose" in done.stderr
    assert f"compare.py: {tmp_path}: its host ended with exit code 1" in done.stderr


_OPEN_TREES = """
import sys
from pathlib import Path
from pairs import BenchmarkError
from trees import open_tree

repository, folder = map(Path, sys.argv[1:])
tree = open_tree("before", folder, repository)
print(tree.label)
print((tree.sources / "telegrad" / "__init__.py").read_text())
for name in ("no-such-revision", "--all", str(repository.parent)):
    try:
        open_tree(name, folder, repository)
    except BenchmarkError as error:
        print(error)
"""


def test_a_tree_is_a_directory_or_a_revision_as_it_was_committed(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    module = repository / "src" / "telegrad" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("committed")

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
        subprocess.run(["git", "-C", repository, *identity, *arguments], check=True, capture_output=True, timeout=60)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "before")
    module.write_text("changed")
    command = [sys.executable, "-c", _OPEN_TREES, repository, tmp_path / "extracted"]
    done = run_loaded(command, timeout=250, cwd=BENCHMARKS)
    label, text, *errors = done.stdout.splitlines()
    assert re.fullmatch(r"before \([0-9a-f]{8}\)", label), done.stderr
    assert text == "committed"
    assert errors == [
        f"'no-such-revision' is neither a directory nor a git revision of {repository}",
        "'--all' is neither a directory nor a git revision",
        f"the directory {str(tmp_path)!r} is no tree of telegrad: it has no src/telegrad/__init__.py",
    ]
