"""Runs programs written for torch.distributed.rpc under the drop-in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.loaded_interpreter import run_loaded
from tests.support.paths import SOURCES


def run_workers(program: str, folder: Path, count: int = 2) -> list[str]:
    """Run `program` on `count` workers, and return the lines that they print, sorted."""
    script = folder / "program.py"
    script.write_text(program)
    done = run_loaded(
        [sys.executable, "-m", "telegrad.cli", "run", "--drop-in", "-n", str(count), str(script)],
        env={**os.environ, "PYTHONPATH": SOURCES},
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return printed_lines(done.stdout)


def printed_lines(output: str) -> list[str]:
    """Return what the workers of `telegrad run` printed, sorted, without the prefixes.

    With `--no-prefix` the workers share one pipe, and `print` writes a line and its end separately: lines would mix.
    """
    return sorted(line.partition(" | ")[2] for line in output.splitlines())
