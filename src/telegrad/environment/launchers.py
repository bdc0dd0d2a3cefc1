"""What each launcher writes into the environment of the workers that it starts.

One function for each launcher returns the `Place` of this process, or None if that launcher did not start it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from telegrad.environment import hydra
from telegrad.environment.nodelist import first, tasks_of_node
from telegrad.errors import RendezvousError

RESTART_VARIABLE = "TELEGRAD_RESTART"
"""Set by launchers: how often the worker was started before."""
BY_HAND = "the environment"
"""The launcher of a place that somebody has set by hand."""
_LOCALHOST = "127.0.0.1"
_PORTS = (20000, 10000)  # the first, and how many: below those that systems give to outgoing connections
_NO_STEP = 0xFFFFFFF0  # steps from this number on are Slurm's own: the script of sbatch, the shell of salloc
_DEFAULT_PORT = 29500  # torch's, for launchers that do not number their jobs


@dataclass(frozen=True)
class Place:
    """What one launcher says about this process. None: it does not say."""

    launcher: str
    """Its name, and the group as it calls it: "srun (Slurm job 12, step 0)"."""
    rank: int | None = None
    size: int | None = None
    group: str = ""
    """Different for groups that may run at the same time."""
    host: str | None = None
    """Where rank 0 runs."""
    port: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    restart: int | None = None
    variables: tuple[str, str] = ("", "")
    """Those that rank and size come from."""

    def describe(self) -> str:
        """Return the place as a clause of a sentence."""
        rank = "an unknown rank" if self.rank is None else f"rank {self.rank}"
        size = "" if self.size is None else f" of {self.size}"
        return f"{self.launcher} says {rank}{size} ({', '.join(name for name in self.variables if name)})"


def telegrad(environ: Mapping[str, str]) -> Place | None:
    """`telegrad run`, `telegrad.launch` and its engines, which set everything."""
    if not environ.get("TELEGRAD_INIT_METHOD"):
        return None
    return _by_torch_variables("telegrad's launcher", environ)


def torchrun(environ: Mapping[str, str]) -> Place | None:
    """Torchrun and torchelastic. A restart count is the same for all workers: they are restarted together."""
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    restart = _number(environ, "TORCHELASTIC_RESTART_COUNT")
    # Torch puts the entries of each restart under a prefix of their own.
    return _by_torch_variables(f"torchrun (run {run})", environ, restart=restart)


def by_hand(environ: Mapping[str, str]) -> Place | None:
    """RANK and WORLD_SIZE, or one of them, which somebody has set."""
    if not (environ.get("RANK") or environ.get("WORLD_SIZE")):
        return None
    return _by_torch_variables(BY_HAND, environ)


def _by_torch_variables(launcher: str, environ: Mapping[str, str], restart: int | None = None) -> Place:
    # What is not a number is refused where it is used (`telegrad.rendezvous_store`).
    rank, size, local_rank, local_size = (
        int(text) if (text := environ.get(name, "")).isdecimal() else None
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    variables = ("" if rank is None else "RANK", "" if size is None else "WORLD_SIZE")
    return Place(
        launcher, rank, size, local_rank=local_rank, local_size=local_size, restart=restart, variables=variables
    )


def open_mpi(environ: Mapping[str, str]) -> Place | None:
    """Open MPI's mpirun. It does not say where rank 0 runs unless all run on one host."""
    rank = _number(environ, "OMPI_COMM_WORLD_RANK")
    if rank is None:
        return None
    size = _size(environ, "OMPI_COMM_WORLD_SIZE", rank, "OMPI_COMM_WORLD_RANK")
    local = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    group = f"openmpi-{job}" if job else ""
    return Place(
        f"mpirun (Open MPI, job {job})" if job else "mpirun (Open MPI)",
        rank,
        size,
        group,
        _LOCALHOST if local == size else None,
        _port(group),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local,
        variables=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    )


def pmi(environ: Mapping[str, str]) -> Place | None:
    """MPICH and Intel MPI (Hydra), and any other launcher that offers PMI.

    Hydra does not number its jobs, so those that span hosts have no name.
    """
    rank = _number(environ, "PMI_RANK")
    if rank is None:
        return None
    size = _size(environ, "PMI_SIZE", rank, "PMI_RANK")
    local = _number(environ, "MPI_LOCALNRANKS")
    job = environ.get("PMI_JOBID", "") or (hydra.job() if local == size else "")
    group = f"pmi-{job}" if job else ""
    if any(name.startswith("I_MPI_") for name in environ):
        launcher = "mpiexec (Intel MPI)"
    else:
        launcher = "mpiexec (MPICH)" if "HYDI_CONTROL_FD" in environ or "MPI_LOCALNRANKS" in environ else "PMI"
    return Place(
        launcher,
        rank,
        size,
        group,
        _LOCALHOST if local == size else None,
        _port(group),
        _number(environ, "MPI_LOCALRANKID"),
        local,
        variables=("PMI_RANK", "PMI_SIZE"),
    )


def slurm(environ: Mapping[str, str]) -> Place | None:
    """Srun. The script of sbatch and the shell of salloc are not tasks that srun started, and have no place."""
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    rank = _number(environ, "SLURM_PROCID")
    if not job or not step or not step.isdecimal() or int(step) >= _NO_STEP or rank is None:
        return None
    counted = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size = _size(environ, counted, rank, "SLURM_PROCID")
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "")
    group = f"slurm-{job}.{step}"
    node = _number(environ, "SLURM_NODEID")
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    return Place(
        f"srun (Slurm job {job}, step {step})",
        rank,
        size,
        group,
        _LOCALHOST if nodes == "1" else slurm_host(environ),
        _port(group),
        _number(environ, "SLURM_LOCALID"),
        None if node is None else tasks_of_node(per_node, node),
        _number(environ, "SLURM_RESTART_COUNT"),
        ("SLURM_PROCID", counted),
    )


def slurm_host(environ: Mapping[str, str]) -> str | None:
    """Return the first node of the step or of the job, which runs rank 0."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    return first(nodes) if nodes else None


def kubernetes(environ: Mapping[str, str]) -> Place | None:
    """An Indexed Job. The manifest that `telegrad k8s` renders sets WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    rank = _number(environ, "JOB_COMPLETION_INDEX")
    if rank is None:
        return None
    size = _number(environ, "WORLD_SIZE")
    if size is not None:
        _check_rank(rank, size, "JOB_COMPLETION_INDEX", "WORLD_SIZE")
    return Place(
        "Kubernetes (an Indexed Job)", rank, size, variables=("JOB_COMPLETION_INDEX", "WORLD_SIZE" if size else "")
    )


def _port(group: str) -> int:
    """Return the port at which rank 0 of a group hosts the rendezvous, unless MASTER_PORT names one."""
    return _PORTS[0] + zlib.crc32(group.encode()) % _PORTS[1] if group else _DEFAULT_PORT


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise RendezvousError(f"{variable} must be a number, not {text!r}")
    return int(text)


def _size(environ: Mapping[str, str], variable: str, rank: int, rank_variable: str) -> int:
    size = _number(environ, variable)
    if size is None:
        raise RendezvousError(f"{rank_variable} is set to {rank}, but {variable} is not: unset one, or set both")
    _check_rank(rank, size, rank_variable, variable)
    return size


def _check_rank(rank: int, size: int, rank_variable: str, size_variable: str) -> None:
    if rank >= size:
        raise RendezvousError(
            f"the environment contradicts itself: {rank_variable} is {rank}, but {size_variable} is {size}, so "
            f"ranks are 0 to {size - 1}"
        )
