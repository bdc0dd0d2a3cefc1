"""Which launcher counts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.environment.test_launchers import MPICH, OPEN_MPI, SBATCH, SRUN, TORCHRUN

from telegrad.environment.detection import Detected, detect, local_rank, restart_count
from telegrad.errors import RendezvousError

BY_HAND = {"RANK": "1", "WORLD_SIZE": "2"}
OURS = {**BY_HAND, "TELEGRAD_INIT_METHOD": "file:///tmp/x"}


def found(*environments: Mapping[str, str]) -> Detected:
    detected = detect({name: value for environ in environments for name, value in environ.items()})
    assert detected is not None
    return detected


@pytest.mark.parametrize("environ", [OURS, TORCHRUN, BY_HAND, OPEN_MPI, MPICH, SRUN])
def test_one_launcher_is_not_ambiguous(environ: Mapping[str, str]) -> None:
    assert not found(environ).ambiguity()


def test_without_a_launcher_there_is_no_place() -> None:
    assert detect({}) is None
    assert detect(SBATCH) is None


def test_torchrun_in_a_batch_script_counts() -> None:
    detected = found(SBATCH, TORCHRUN)
    assert (detected.place.rank, detected.place.size) == (1, 4)
    assert not detected.ambiguity()


def test_torchrun_in_a_task_of_srun_counts_and_is_reported() -> None:
    detected = found(SRUN, {**TORCHRUN, "WORLD_SIZE": "8"})
    assert (detected.place.rank, detected.place.size) == (1, 8)
    text = detected.ambiguity()
    assert "torchrun (run none) says rank 1 of 8" in text
    assert "srun (Slurm job 12, step 0) says rank 3 of 4" in text


def test_mpirun_in_a_batch_script_takes_the_host_of_the_job() -> None:
    detected = found(SBATCH, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert (detected.place.rank, detected.place.host) == (1, "n1")
    assert not detected.ambiguity()


def test_mpirun_that_starts_its_daemons_with_srun_counts() -> None:
    detected = found(SRUN, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert (detected.place.rank, detected.place.size, detected.place.host) == (1, 8, "n1")
    assert "srun" in detected.ambiguity()


def test_srun_that_offers_pmi_is_one_launcher() -> None:
    detected = found(SRUN, {"PMI_RANK": "3", "PMI_SIZE": "4"})
    assert (detected.place.host, detected.place.group, detected.place.local_rank) == ("n1", "slurm-12.0", 1)
    assert not detected.ambiguity()


def test_telegrads_own_launcher_counts_everywhere() -> None:
    detected = found(SRUN, OPEN_MPI, OURS)
    assert detected.ours
    assert (detected.place.rank, detected.place.size) == (1, 2)
    assert not detected.ambiguity()


def test_a_group_by_hand_inside_a_task_counts() -> None:
    detected = found(SRUN, BY_HAND)
    assert (detected.place.rank, detected.place.size) == (1, 2)
    assert "the environment says rank 1 of 2" in detected.ambiguity()


@pytest.mark.parametrize("by_hand", [{"RANK": "0"}, {"WORLD_SIZE": "8"}, {"RANK": "0", "WORLD_SIZE": "4"}])
def test_a_contradiction_names_both(by_hand: Mapping[str, str]) -> None:
    with pytest.raises(RendezvousError, match=r"the environment says .* but srun \(Slurm job 12, step 0\) says rank 3"):
        detect({**SRUN, **by_hand})


@pytest.mark.parametrize("by_hand", [{"RANK": "3"}, {"WORLD_SIZE": "4"}, {"RANK": "3", "WORLD_SIZE": "4"}])
def test_variables_by_hand_that_agree_are_no_contradiction(by_hand: Mapping[str, str]) -> None:
    detected = found(SRUN, by_hand)
    assert (detected.place.rank, detected.place.size, detected.place.group) == (3, 4, "slurm-12.0")
    assert not detected.ambiguity()


def test_restarts() -> None:
    assert restart_count({}) is None
    assert restart_count({"TELEGRAD_RESTART": ""}) is None
    assert restart_count({**TORCHRUN, "TELEGRAD_RESTART": "5"}) == 5
    assert restart_count({**SRUN, "SLURM_RESTART_COUNT": "1"}) == 1
    with pytest.raises(RendezvousError, match="TELEGRAD_RESTART must be how often"):
        restart_count({"TELEGRAD_RESTART": "x"})


def test_local_ranks() -> None:
    assert local_rank({}) == (None, None)
    assert local_rank(OPEN_MPI) == local_rank(MPICH) == local_rank(SRUN) == (1, 2)
    assert local_rank({**SRUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == (0, 1)
