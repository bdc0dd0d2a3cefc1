"""Advice names the command of the launcher."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.environment.test_launchers import MPICH, OPEN_MPI, SBATCH, SRUN, TORCHRUN

from telegrad.environment.advice import address_advice, token_advice

POD = {"JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        ({}, "`telegrad token` once"),
        (OPEN_MPI, "mpirun -x TELEGRAD_TOKEN"),
        (MPICH, "`TELEGRAD_TOKEN=$(telegrad token) mpiexec"),
        (SRUN, "before srun"),
        (TORCHRUN, "TELEGRAD_TOKEN_FILE=~/.telegrad-token before torchrun"),
        (POD, "kubectl create secret generic telegrad"),
    ],
)
def test_a_missing_token(environ: Mapping[str, str], command: str) -> None:
    assert command in token_advice(environ)


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        ({}, "no launcher has started this process: telegrad.launch.workers(2)"),
        (OPEN_MPI, "mpirun -x MASTER_ADDR=HOST"),
        (MPICH, "mpiexec -genv MASTER_ADDR HOST"),
        (SBATCH, "Slurm job 12, but not as one of its tasks: start the workers with `srun python ...`"),
        (POD, "`telegrad k8s`"),
    ],
)
def test_a_missing_address(environ: Mapping[str, str], command: str) -> None:
    assert command in address_advice(environ)


def test_a_script_without_a_launcher_is_told_how_to_start_it() -> None:
    assert "start it with `telegrad run -n 2 hello.py`, or under torchrun" in address_advice({}, "hello.py")


def test_a_group_by_hand_inside_a_task_of_slurm_needs_an_address() -> None:
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    said = address_advice({**task, "RANK": "0", "WORLD_SIZE": "1"})
    assert "RANK and WORLD_SIZE are set, so they count" in said
    assert "says rank 1 of 4" in said
    assert "not as one of its tasks" not in said


def test_a_place_by_hand_is_not_asked_for_again() -> None:
    assert address_advice({}, "x.py").endswith("To start every worker by hand, set them, RANK and WORLD_SIZE")
    for environ in ({"RANK": "0", "WORLD_SIZE": "2"}, {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "2"}):
        assert address_advice(environ, "x.py").endswith("To start every worker by hand, set them")
