"""Groups that mpirun starts. Here a script stands in for it; `make test-cluster` uses Open MPI and MPICH."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.launch.test_base import run_check

from telegrad.launch import mpi
from telegrad.launch.base import Group
from telegrad.testing.launch_contract import CHECKS, Check, LauncherUnderTest

MPIRUN = """#!/bin/sh
[ "$1" = -n ] || exit 0
count=$2
shift 2
for rank in $(seq 0 $((count - 1))); do
    PMI_RANK=$rank PMI_SIZE=$count MPI_LOCALNRANKS=$count "$@" &
done
wait
"""
QUICK = ("results_are_in_the_order_of_the_workers", "a_process_that_dies_is_named", "stop_ends_all_workers")
"""Checks whose workers need no torch."""


@pytest.fixture
def mpirun(tmp_path: Path) -> str:
    script = tmp_path / "mpirun"
    script.write_text(MPIRUN)
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize("check", [check for check in CHECKS if check.__name__ in QUICK], ids=lambda one: one.__name__)
def test_the_contract(check: Check, mpirun: str) -> None:
    def start(fn: Any, workers: Any, args: Any = (), **options: Any) -> Group:
        return mpi.start(fn, workers, args, command=mpirun, address="127.0.0.1", **options)

    run_check(check, LauncherUnderTest(start))


def place() -> list[str | None]:
    names = ("RANK", "WORLD_SIZE", "TELEGRAD_NAME", "TORCHELASTIC_RUN_ID", "TELEGRAD_RUNTIME_DIR")
    return [os.environ.get(name) for name in names]


def test_a_worker_of_another_launcher_can_start_a_group(mpirun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "TELEGRAD_NAME": "outer",
        "TELEGRAD_INIT_METHOD": "file:///outer",
        "TELEGRAD_RUNTIME_DIR": "/outer",
        "TORCHELASTIC_RUN_ID": "outer",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with mpi.start(place, ["a", "b"], command=mpirun, address="127.0.0.1", init=False) as group:
        assert group.join(60) == [["0", "2", "a", None, None], ["1", "2", "b", None, None]]
