"""What to do about a missing token or address, as a command for the launcher that started this process."""

from __future__ import annotations

from collections.abc import Mapping

from telegrad.environment import launchers
from telegrad.environment.detection import detect

_TOKEN_FILE = (
    "Run `(umask 077; telegrad token > ~/.telegrad-token)` once, on a file system that all nodes share, and set "
    "TELEGRAD_TOKEN_FILE=~/.telegrad-token"
)


def token_advice(environ: Mapping[str, str]) -> str:
    """Return how to give every worker the same token.

    >>> token_advice({})
    'Run `telegrad token` once and set TELEGRAD_TOKEN to its output on every worker.'
    """
    if launchers.torchrun(environ) is not None:
        return f"{_TOKEN_FILE} before torchrun on every node."
    if launchers.open_mpi(environ) is not None:
        return "Start with `TELEGRAD_TOKEN=$(telegrad token) mpirun -x TELEGRAD_TOKEN ...`."
    if launchers.slurm(environ) is not None:
        return "Run `export TELEGRAD_TOKEN=$(telegrad token)` before srun, or in the script of sbatch."
    if launchers.pmi(environ) is not None:
        return "Start with `TELEGRAD_TOKEN=$(telegrad token) mpiexec ...`."
    if launchers.kubernetes(environ) is not None:
        return (
            "Run `kubectl create secret generic telegrad --from-literal=token=$(telegrad token)` and use a manifest "
            "that `telegrad k8s` renders."
        )
    return "Run `telegrad token` once and set TELEGRAD_TOKEN to its output on every worker."


def address_advice(environ: Mapping[str, str], program: str = "") -> str:
    """Return why the address of rank 0 is unknown and what to set. `program` is the script; empty at a prompt."""
    detected = detect(environ)
    if detected is not None and detected.others and detected.place == launchers.by_hand(environ):
        return (
            f"RANK and WORLD_SIZE are set, so they count, although {detected.others[0].describe()}: set the address, "
            "too, or unset them"
        )
    if launchers.open_mpi(environ) is not None:
        return "mpirun does not say where rank 0 runs: start with `mpirun -x MASTER_ADDR=HOST ...`, its host"
    if launchers.pmi(environ) is not None:
        return "mpiexec does not say where rank 0 runs: start with `mpiexec -genv MASTER_ADDR HOST ...`, its host"
    if launchers.kubernetes(environ) is not None:
        return "set MASTER_ADDR and MASTER_PORT in the manifest, as the one does that `telegrad k8s` renders"
    if environ.get("SLURM_JOB_ID"):
        return (
            f"this process runs in Slurm job {environ['SLURM_JOB_ID']}, but not as one of its tasks: start the workers "
            "with `srun python ...`"
        )
    alone = (
        f"start it with `telegrad run -n 2 {program}`, or under torchrun, srun or mpirun"
        if program
        else "telegrad.launch.workers(2) starts two workers and makes this prompt a member of their group"
    )
    by_hand = ", RANK and WORLD_SIZE" if detected is None or None in (detected.place.rank, detected.place.size) else ""
    return f"no launcher has started this process: {alone}. To start every worker by hand, set them{by_hand}"
