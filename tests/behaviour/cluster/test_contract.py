"""Every engine fulfills the contract of `telegrad.launch.base`, on the real software. `make test-cluster` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import launch_engines, sshd
from tests.support.launch_engines import ENGINES, outcome
from tests.support.namespaces import network_of
from tests.support.paths import ROOT
from tests.support.patience import eventually
from tests.support.slurm import slurm_cluster

from telegrad import launch
from telegrad.testing.launch_contract import CHECKS, Check
from telegrad.transport.addresses import remove_dead_sockets
from telegrad.transport.runtime_directory import runtime_directory

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set up one engine for all checks."""
    if reason := launch_engines.why_not(request.param):
        pytest.skip(reason)
    if request.param != "slurm":
        yield request.param
        return
    with slurm_cluster() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield request.param


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_engine(check: Check, engine: str) -> None:
    assert outcome(check, ENGINES[engine], restarts=engine == "torchrun") == ""


def test_nothing_is_left_when_the_launcher_is_killed(engine: str, tmp_path: Path) -> None:
    mark = f"{tmp_path.name}-{secrets.token_hex(8)}"
    program = f"""
        from tests.support.launch_engines import ENGINES
        from telegrad.testing.launch_contract.harness import wait_forever
        ENGINES[{engine!r}](wait_forever, ["a", "b"], ({str(tmp_path)!r},)).join()
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TELEGRAD_TEST_MARK": mark}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, env=environment) as launcher:
        try:
            eventually(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists(), "the start of the workers")
            assert len(marked(mark)) >= 3, "the launcher and the workers"
        finally:
            launcher.kill()
    eventually(lambda: not marked(mark), f"the end of {marked(mark)}", within=60.0)
    remove_dead_sockets(runtime_directory())  # as the next worker on the host does


def start_another(engine: str) -> list[int]:
    if os.environ["RANK"] != "0":
        return []
    # A step of Slurm holds its CPUs: without this option, a step inside of it waits until they are free.
    options = {"options": ["--overlap", "--overcommit", "--nodes=1"]} if engine == "slurm" else {}
    start = launch.slurm.start if engine == "slurm" else ENGINES[engine]
    with start(lambda: int(os.environ["RANK"]), 2, init=False, **options) as group:
        return group.join(120)


def test_a_worker_can_start_a_group_on_its_engine(engine: str) -> None:
    with ENGINES[engine](start_another, 2, (engine,), init=False) as group:
        assert group.join(300) == [[0, 1], []]


def marked(mark: str) -> list[int]:
    """Return the processes that have inherited the environment of a launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is a zombie
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def ssh_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What all checks say of a launcher on host c whose workers run on hosts a and b."""
    if reason := sshd.why_not():
        pytest.skip(reason)
    directory: Path = tmp_path_factory.mktemp("ssh")
    with network_of(["a", "b", "c"]) as network, sshd.sshd_hosts(network, ["a", "b"], directory) as ssh:
        options = json.dumps({"hosts": [network.address("a"), network.address("b")], "ssh": ssh})
        done = subprocess.run(
            [*network.inside("c"), sys.executable, "-m", "tests.support.launch_engines", options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=1200,
            check=False,
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    return {line["check"]: line["wrong"] for line in lines}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ssh(check: Check, ssh_outcomes: dict[str, str]) -> None:
    assert ssh_outcomes[check.__name__] == ""
