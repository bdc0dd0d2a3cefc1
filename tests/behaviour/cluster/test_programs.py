"""One program that calls `init_rpc()` without arguments, under every launcher. `make test-cluster` runs it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.project.test_readme import README
from tests.project.test_readme import block as readme_block
from tests.support import launch_engines
from tests.support.launch_engines import OPEN_MPI
from tests.support.paths import ROOT
from tests.support.slurm import slurm_cluster

PROGRAM = [sys.executable, str(ROOT / "tests" / "support" / "cluster_program.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TIMEOUT = 300

pytestmark = pytest.mark.timeout(400)


def parse(text: str) -> list[dict[str, Any]]:
    """Return the lines of the workers by rank."""
    return sorted(
        (json.loads(line) for line in text.splitlines() if line.startswith("{")), key=lambda line: line["rank"]
    )


def complete(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def run(command: Sequence[str], **environment: str) -> list[dict[str, Any]]:
    done = complete(command, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return parse(done.stdout)


def check(lines: Sequence[dict[str, Any]], size: int) -> None:
    """Check that the workers are one group, and that a gradient crossed it."""
    names = [f"worker{rank}" for rank in range(size)]
    assert [line["name"] for line in lines] == names
    assert [line["rank"] for line in lines] == list(range(size))
    assert all(line["others"] == names and line["gradient"] == [3.0, 3.0] for line in lines)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    if reason := launch_engines.why_not("slurm"):
        pytest.skip(reason)
    with slurm_cluster() as environment:
        yield environment


@pytest.mark.parametrize(
    "options",
    [["--ntasks=3"], ["--nodes=2", "--ntasks-per-node=1"], ["--nodes=2", "--ntasks=3", "--overcommit"]],
    ids=str,
)
def test_srun(options: list[str], cluster: dict[str, str]) -> None:
    lines = run(["srun", *options, *PROGRAM], **cluster)
    check(lines, len(lines))
    assert len(lines) == (2 if "--ntasks-per-node=1" in options else 3)


def test_two_steps_of_one_job_are_two_groups(cluster: dict[str, str], tmp_path: Path) -> None:
    program = shlex.join(PROGRAM)
    script = tmp_path / "job.sh"
    one, two = tmp_path / "one", tmp_path / "two"
    script.write_text(
        "#!/bin/sh\n#SBATCH --ntasks=4\n"
        f"srun --ntasks=2 --exact {program} > {one} &\nsrun --ntasks=2 --exact {program} > {two} &\nwait\n"
    )
    output = tmp_path / "output"
    command = ["sbatch", "--wait", f"--output={output}", str(script)]
    complete(command, cluster)
    for found in (one, two):
        check(parse(found.read_text()), 2)


def test_a_batch_script_without_srun_is_told_so(cluster: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = ["sbatch", "--wait", "--ntasks=2", f"--output={output}", f"--wrap={shlex.join(PROGRAM)}"]
    complete(command, cluster)
    assert "start the workers with `srun python ...`" in output.read_text()


def test_a_rank_that_all_tasks_inherit_is_refused(cluster: dict[str, str], tmp_path: Path) -> None:
    # Rank 0 has the right rank. It is told, unless it comes too late for that.
    command = ["srun", "--ntasks=2", "--kill-on-bad-exit=1", *PROGRAM]
    by_hand = {"RANK": "0", "WORLD_SIZE": "2"}
    done = complete(command, {**cluster, **by_hand, "TELEGRAD_RUNTIME_DIR": str(tmp_path)})
    assert done.returncode != 0
    assert "the environment says rank 0 of 2 (RANK, WORLD_SIZE), but srun (Slurm job" in done.stderr


def test_torchrun_in_a_task_counts_and_is_reported(cluster: dict[str, str]) -> None:
    command = ["srun", "--ntasks=1", *TORCHRUN, "--standalone", "--nproc-per-node=2", *PROGRAM[1:]]
    done = complete(command, cluster)
    assert done.returncode == 0, done.stderr
    check(parse(done.stdout), 2)
    assert "torchrun (run " in done.stderr
    assert "says rank 0 of 2 (RANK, WORLD_SIZE), the innermost, which counts; srun (Slurm job" in done.stderr


@pytest.mark.parametrize("engine", ["openmpi", "mpich"])
def test_mpirun(engine: str) -> None:
    if reason := launch_engines.why_not(engine):
        pytest.skip(reason)
    options = OPEN_MPI if engine == "openmpi" else []
    check(run([f"mpirun.{engine}", "-n", "3", *options, *PROGRAM]), 3)


@pytest.mark.parametrize("engine", ["openmpi", "mpich"])
def test_two_jobs_of_mpirun_are_two_groups(engine: str) -> None:
    if reason := launch_engines.why_not(engine):
        pytest.skip(reason)
    command = [f"mpirun.{engine}", "-n", "2", *(OPEN_MPI if engine == "openmpi" else []), *PROGRAM]
    jobs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [job.communicate(timeout=TIMEOUT)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0]
    for output in outputs:
        check(parse(output), 2)


@pytest.fixture
def torchrun() -> list[str]:
    if reason := launch_engines.why_not("torchrun"):
        pytest.skip(reason)
    return TORCHRUN


def test_torchrun_on_one_node(torchrun: list[str]) -> None:
    check(run([*torchrun, "--standalone", "--nproc-per-node=2", *PROGRAM[1:]]), 2)


def test_workers_come_back_under_their_names_after_a_restart(torchrun: list[str]) -> None:
    command = [*torchrun, "--standalone", "--nproc-per-node=2", "--max-restarts=1", *PROGRAM[1:]]
    lines = run(command, FAIL_ONCE="worker1")
    last = [line for line in lines if line["restart"] == "1"]
    check(last, 2)


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_torchrun_on_two_nodes(torchrun: list[str], nodes: str, free_port: int) -> None:
    command = [
        *(*torchrun, f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=test"),
        *(f"--rdzv-endpoint=localhost:{free_port}", "--max-restarts=2", *PROGRAM[1:]),
    ]
    agents = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [agent.communicate(timeout=TIMEOUT) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    check(parse("".join(output for output, _ in outputs)), 2)


def test_a_group_grows_when_an_agent_joins(torchrun: list[str], free_port: int) -> None:
    command = [
        *(*torchrun, "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=test", "--max-restarts=2"),
        *(f"--rdzv-endpoint=localhost:{free_port}", "--rdzv-conf=last_call_timeout=2", "--monitor-interval=0.5"),
        *PROGRAM[1:],
    ]
    # Without the second one, torch 2.13 gives the agents different stores after the first round (docs/clusters.md).
    environment = {**os.environ, "AWAITED_SIZE": "2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def agent() -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    with agent() as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "alone as worker0\n"
        with agent() as second:
            outputs = [one.communicate(timeout=TIMEOUT)[0] for one in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    check(parse("".join(outputs)), 2)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_program_of_the_readme_changes_one_line(cluster: dict[str, str], tmp_path: Path) -> None:
    program = readme_block("python", 1)
    line = "with launch.slurm.start(train, workers=4) as group:"
    assert line in README
    (tmp_path / "train.py").write_text(program.replace("with launch.start(train, workers=4) as group:", line))
    done = complete([sys.executable, str(tmp_path / "train.py")], cluster)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout.splitlines()[-1]) < 1
