"""``python -m fuzz``: run the fuzz targets with atheris, one after the other, and print a table.

New inputs are collected in ``.fuzz``, crashes in ``fuzz/crashes``, which `tests/fuzz` replays: commit a crash together
with its fix. ``--minimize`` chooses the inputs worth committing and writes them to ``fuzz/corpus``.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fuzz.corpus import CRASHES, ROOT, inputs, minimize, write_seeds
from fuzz.targets import TARGETS

TIMEOUT = 20
"""Seconds that one input may take."""
MEMORY = 3000
"""Megabytes that a fuzzing process may take; torch itself takes about 400 with instrumentation."""

_STATUS = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)")
_EXECUTIONS = re.compile(r"stat::number_of_executed_units: +(\d+)")
_NEW = re.compile(r"stat::new_units_added: +(\d+)")


@dataclass(frozen=True)
class Result:
    """What one run of a target found."""

    target: str
    seconds: float
    executions: int
    coverage: int
    features: int
    corpus: int
    new: int
    crashes: tuple[Path, ...]
    failed: bool

    def __str__(self) -> str:
        rate = self.executions / self.seconds if self.seconds else 0
        return (
            f"{self.target:<12} {self.executions:>11,} {rate:>9,.0f} {self.coverage:>7,} {self.features:>8,} "
            f"{self.corpus:>7,} {self.new:>5,} {len(self.crashes):>8,}"
        )


HEADER = f"{'target':<12} {'executions':>11} {'per s':>9} {'cov':>7} {'ft':>8} {'corpus':>7} {'new':>5} {'crashes':>8}"


def fuzz(name: str, seconds: int, *, verbose: bool) -> Result:
    """Run one target for some seconds, longer only if a crash is found: the run then goes on after it."""
    write_seeds(TARGETS[name])
    crashes = CRASHES / name
    crashes.mkdir(parents=True, exist_ok=True)
    known = set(crashes.iterdir())
    start = time.monotonic()
    executions = coverage = features = corpus = new = 0
    failed = False
    while (left := seconds - int(time.monotonic() - start)) > 0:
        output = _run(name, left, verbose=verbose)
        for found in _STATUS.findall(output):
            coverage, features, corpus = (
                max(old, int(value)) for old, value in zip((coverage, features, corpus), found, strict=True)
            )
        executions += sum(map(int, _EXECUTIONS.findall(output)))
        new += sum(map(int, _NEW.findall(output)))
        found_now = set(crashes.iterdir()) - known
        if not _EXECUTIONS.search(output) or len(found_now) > 10:
            failed = not found_now
            print(output[-3000:], file=sys.stderr)
            break
    found_files = tuple(sorted(set(crashes.iterdir()) - known))
    if not any(crashes.iterdir()):
        crashes.rmdir()
    return Result(name, time.monotonic() - start, executions, coverage, features, corpus, new, found_files, failed)


def _run(name: str, seconds: int, *, verbose: bool) -> str:
    target = TARGETS[name]
    command = [
        *(sys.executable, "-m", "fuzz.atheris_main", name),
        f"-max_total_time={seconds}",
        f"-timeout={TIMEOUT}",
        f"-rss_limit_mb={MEMORY}",
        f"-max_len={target.max_size}",
        f"-artifact_prefix={CRASHES / name}/",
        "-print_final_stats=1",
        "-close_fd_mask=1",
        *(str(folder) for folder in inputs(target)),
    ]
    # Always read, because the counts of the table are in it: libFuzzer writes to stderr.
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if verbose:
                print(line, end="", file=sys.stderr, flush=True)
    return "".join(lines)


def main() -> int:
    """Run what the arguments say, and return 1 if a crash was found, 2 if atheris is missing."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=600, help="in all; the targets share them equally")
    parser.add_argument("--minimize", action="store_true", help="write the committed corpus, and do not fuzz")
    parser.add_argument("--replay", metavar="FILE", help="run one input of the target, and show what it raises")
    parser.add_argument("-v", "--verbose", action="store_true", help="show libFuzzer's output, too")
    options = parser.parse_args()
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown target {', '.join(sorted(unknown))}; choose from {', '.join(TARGETS)}")
    names = options.targets or list(TARGETS)
    if options.replay is not None:
        if len(names) != 1:
            parser.error("--replay needs one target")
        TARGETS[names[0]](Path(options.replay).read_bytes())
        print(f"{names[0]} raised nothing")
        return 0
    if options.minimize:
        for name in names:
            print(minimize(TARGETS[name]))
        return 0
    if importlib.util.find_spec("atheris") is None:
        print("python -m fuzz: atheris is not installed; run `make fuzz`, which installs it first.", file=sys.stderr)
        return 2
    print(HEADER, flush=True)
    results = []
    for name in names:
        results.append(fuzz(name, max(1, options.seconds // len(names)), verbose=options.verbose))
        print(results[-1], flush=True)
    print(f"{sum(result.executions for result in results):,} executions")
    for result in results:
        for crash in result.crashes:
            print(f"{result.target}: python -m fuzz {result.target} --replay {crash.relative_to(ROOT)}")
    return 1 if any(result.crashes or result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
