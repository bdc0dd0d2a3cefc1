"""Runs a group of `reach_worker`s, and returns how each reached the others."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.paths import ROOT

PATIENCE = 200.0


@dataclass(frozen=True)
class Place:
    """Where a worker runs: a command that it begins with, and variables."""

    command: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def reach(places: Mapping[str, Place], directory: Path, rendezvous: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return, by worker, the scheme at which it reached each other one. Raises if one fails."""
    token = secrets.token_hex(32)
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for rank, (name, place) in enumerate(places.items()):
            environment = {
                **os.environ,
                **rendezvous,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "TELEGRAD_NAME": name,
                "TELEGRAD_TOKEN": token,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                **place.variables,
            }
            with (directory / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(
                    [*place.command, sys.executable, "-m", "tests.support.reach_worker"],
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        outputs = {name: process.communicate(timeout=PATIENCE)[0] for name, process in processes.items()}
        failed = [name for name, process in processes.items() if process.returncode]
        assert not failed, "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(directory.glob("*.log")))
        return {name: json.loads(output.splitlines()[-1]) for name, output in outputs.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.communicate(timeout=PATIENCE)
