"""What each launcher says. The variables were recorded under the real ones, except Intel's and Kubernetes'."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from telegrad.environment import launchers
from telegrad.errors import RendezvousError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1573191681",
    "PMIX_RANK": "1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}
SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
SBATCH = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "vm",
    "MASTER_PORT": "29400",
}


def test_open_mpi() -> None:
    place = launchers.open_mpi(OPEN_MPI)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (1, 2, 1, 2)
    assert (place.host, place.group) == ("127.0.0.1", "openmpi-1573191681")
    assert place.port is not None
    assert 20000 <= place.port < 30000
    on_two_hosts = launchers.open_mpi({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert on_two_hosts is not None
    assert on_two_hosts.host is None


def test_mpich_and_intel_mpi() -> None:
    place = launchers.pmi(MPICH)
    assert place is not None
    assert (place.launcher, place.rank, place.size, place.host, place.port) == (
        *("mpiexec (MPICH)", 1, 2),
        *("127.0.0.1", 29500),
    )
    intel = launchers.pmi({**MPICH, "I_MPI_RANK_CMD": ""})
    assert intel is not None
    assert intel.launcher == "mpiexec (Intel MPI)"
    plain = launchers.pmi({"PMI_RANK": "0", "PMI_SIZE": "1"})
    assert plain is not None
    assert (plain.launcher, plain.host) == ("PMI", None)


def test_srun() -> None:
    place = launchers.slurm(SRUN)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 1, 2)
    assert (place.host, place.group) == ("n1", "slurm-12.0")
    alone = launchers.slurm({**SRUN, "SLURM_STEP_NUM_NODES": "1"})
    assert alone is not None
    assert alone.host == "127.0.0.1"


def test_steps_of_one_job_have_different_ports() -> None:
    ports = {launchers.slurm({**SRUN, "SLURM_STEP_ID": str(step)}).port for step in range(8)}  # type: ignore[union-attr]  # it is a step
    assert len(ports) == 8


def test_the_shell_of_salloc_is_no_task() -> None:
    assert launchers.slurm({**SRUN, "SLURM_STEP_ID": "4294967290"}) is None  # Slurm's number of an interactive step


def test_the_script_of_sbatch_is_no_task() -> None:
    assert launchers.slurm(SBATCH) is None


def test_torchrun_counts_restarts() -> None:
    place = launchers.torchrun(TORCHRUN)
    assert place is not None
    assert (place.rank, place.size, place.restart) == (1, 4, 2)


def test_a_pod_of_an_indexed_job() -> None:
    place = launchers.kubernetes({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"})
    assert place is not None
    assert (place.rank, place.size) == (2, 4)


@pytest.mark.parametrize(
    ("launcher", "environ", "message"),
    [
        (launchers.slurm, {**SRUN, "SLURM_PROCID": "4"}, "SLURM_PROCID is 4, but SLURM_STEP_NUM_TASKS is 4"),
        (launchers.open_mpi, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, "but OMPI_COMM_WORLD_SIZE is not"),
        (launchers.pmi, {**MPICH, "PMI_RANK": "x"}, "PMI_RANK must be a number, not 'x'"),
        (launchers.kubernetes, {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2"),
    ],
)
def test_a_launcher_that_contradicts_itself_is_refused(
    launcher: object, environ: Mapping[str, str], message: str
) -> None:
    with pytest.raises(RendezvousError, match=message):
        launcher(environ)  # type: ignore[operator]  # a function of launchers
