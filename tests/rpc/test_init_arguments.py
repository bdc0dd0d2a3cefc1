"""Arguments of `init_rpc` that the launcher supplies."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
from tests.environment.test_launchers import OPEN_MPI, SRUN, TORCHRUN

from telegrad.errors import RendezvousError
from telegrad.options import Options
from telegrad.rpc import init_arguments
from telegrad.rpc.init_arguments import complete

BY_TELEGRAD = {"TELEGRAD_INIT_METHOD": "file:///tmp/store", "RANK": "1", "WORLD_SIZE": "4"}


def completed(environ: Mapping[str, str], rank: int = -1, size: int | None = None, method: str = "env://") -> tuple:  # type: ignore[type-arg]  # compared as a whole
    options, rank, size, prefix = complete(Options(init_method=method), rank, size, environ)
    return options.init_method.rpartition(":")[0], rank, size, prefix


def test_srun_supplies_everything() -> None:
    assert completed(SRUN) == ("tcp://n1", 3, 4, "telegrad/slurm-12.0")


def test_what_is_given_counts() -> None:
    assert completed(SRUN, rank=1, size=2) == ("tcp://n1", 1, 2, "telegrad/slurm-12.0")
    assert completed(SRUN, method="tcp://a:1") == ("tcp://a", 3, 4, "telegrad/slurm-12.0")
    assert completed(SRUN, method="tcp://a:1?rank=0&world_size=1")[1:] == (-1, None, "telegrad")
    assert completed(SRUN, size=0) == ("tcp://n1", -1, 0, "telegrad/slurm-12.0")


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("environ", [SRUN, {**TORCHRUN, "RANK": "3"}, {**BY_TELEGRAD, "RANK": "3"}])
def test_a_world_size_that_contradicts_the_launcher_is_an_error(environ: Mapping[str, str], size: int) -> None:
    with pytest.raises(RendezvousError, match=f"world_size={size}, but .* has started 4 workers, and this is rank 3"):
        completed(environ, size=size)
    assert completed(environ, rank=1, size=size)[2] == size  # another group than the launcher's
    assert completed(environ, size=4)[2] == 4


def test_a_number_that_is_still_text_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"world_size must be an int, not '2': write int\(\.\.\.\)"):
        completed(BY_TELEGRAD, size="2")  # type: ignore[arg-type]  # os.environ["WORLD_SIZE"]
    with pytest.raises(TypeError, match="rank must be an int, not '0'"):
        completed(BY_TELEGRAD, rank="0")  # type: ignore[arg-type]


def test_a_world_size_counts_more_than_one_that_is_set_by_hand() -> None:
    assert completed({"RANK": "0", "WORLD_SIZE": "2"}, size=3)[2] == 3


def test_the_address_of_the_environment_counts() -> None:
    assert completed({**SRUN, "MASTER_ADDR": "x"})[0] == "tcp://x"
    options = complete(Options(), -1, None, {**SRUN, "MASTER_PORT": "4"}).options
    assert options.init_method == "tcp://n1:4"
    assert completed({**SRUN, "MASTER_ADDR": "x", "MASTER_PORT": "4"})[0] == "env"


def test_torchrun_keeps_torchs_own_rendezvous() -> None:
    assert completed(TORCHRUN) == ("env", 1, 4, "telegrad")


def test_without_a_launcher_nothing_changes() -> None:
    assert completed({}) == ("env", -1, None, "telegrad")


def test_a_pod_needs_the_number_of_pods() -> None:
    with pytest.raises(RendezvousError, match="pod 1 of a Kubernetes job"):
        completed({"JOB_COMPLETION_INDEX": "1"})
    manifest = {"WORLD_SIZE": "4", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "29500"}
    assert completed({"JOB_COMPLETION_INDEX": "1", **manifest}) == ("env", 1, 4, "telegrad")


def test_an_ambiguous_environment_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    nested = {**SRUN, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    with caplog.at_level(logging.INFO, "telegrad"):
        completed(nested)
        completed({**nested, "OMPI_COMM_WORLD_RANK": "0"})
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "srun (Slurm job 12, step 0) says rank 3 of 4" in caplog.text


def test_others_are_told_of_a_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(init_arguments, "report_failure", lambda *args, **options: told.append((*args, options)))
    error = RendezvousError("x")
    init_arguments.report_contradiction(Options(), "a", -1, None, error, {**SRUN, "RANK": "0", "WORLD_SIZE": "4"})
    ((options, *rest),) = told
    assert isinstance(options, Options)
    assert options.init_method.startswith("tcp://n1:")
    assert rest == ["a", 3, 4, error, {"prefix": "telegrad/slurm-12.0"}]
    init_arguments.report_contradiction(Options(), "a", -1, None, error, {**SRUN, "SLURM_PROCID": "9"})
    assert len(told) == 1
