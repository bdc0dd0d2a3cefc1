"""PyTorch's test suites for RPC, distributed autograd, the optimizer and remote modules pass against telegrad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT))

from conformance.exceptions import differences, excluded
from conformance.suites import SUITES

from telegrad.testing import accelerator


def conformance(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "conformance", "-j", "2", "-v", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["1/2", "2/2"])  # in parts, so that each stays far below its timeout
@pytest.mark.parametrize(
    "suites",
    [
        ["autograd", "autograd-tensorpipe", "optimizer", "remote-module", "remote-module-three"],
        ["rpc", "rpc-tensorpipe"],
    ],
    ids=lambda suites: f"{suites[0]}-{suites[-1]}",
)
def test_a_suite_passes(suites: list[str], part: str) -> None:
    done = conformance(*suites, "--part", part)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["1/4"])  # `make conformance` runs all of them
def test_device_maps_of_cudas_suites_pass_on_simulated_devices(part: str) -> None:
    if (reason := accelerator.why_unavailable()) is not None:
        pytest.skip(reason)
    done = conformance("--simulate", "-k", "test_device*", "--part", part)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tests", ["test_*_delay_timeout*", "test_check_failed_messages"])  # the others wait longer
def test_some_tests_of_the_faulty_agents_suites_pass(tests: str) -> None:
    done = conformance("faulty-rpc", "-k", tests)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]


@cache
def facts() -> Any:
    """Return what a new process finds out about the suites: only there can torch's test kit be imported."""
    program = """
import json
import pickle
from torch.testing._internal.distributed import rpc_utils
from conformance.suites import SUITES, make_case

lists = [value for name, value in vars(rpc_utils).items() if name.endswith("_TESTS")]
tests = [(suite, test) for suite in SUITES for test in suite.tests()]
suite = next(suite for suite in SUITES if suite.name == "parameter-server")
case = make_case(suite, suite.tests()[0])
print(json.dumps({
    "tests": [(suite.name, test) for suite, test in tests],
    "need CUDA": sum(suite.needs_cuda(test) for suite, test in tests),
    "lists": len(lists),
    "all are listed": {cls for tests in lists for cls in tests} == {suite.load() for suite in SUITES},
    "the case has the class of its pickle": pickle.loads(pickle.dumps(type(case))) is type(case),
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_every_exception_names_an_existing_test_and_an_allowed_reason() -> None:
    there = {tuple(names) for names in facts()["tests"]}
    assert set(excluded()) <= there
    assert set(excluded(simulated=True)) <= there
    assert set(differences()) <= there
    assert not set(excluded()) & set(differences())


def test_every_rpc_suite_of_pytorch_is_listed() -> None:
    assert facts()["all are listed"]
    assert facts()["lists"] == 5
    assert facts()["need CUDA"] == 98
    assert len(facts()["tests"]) - facts()["need CUDA"] == 465


def test_a_test_case_can_be_pickled_by_name() -> None:
    assert facts()["the case has the class of its pickle"]


def test_at_most_eight_tests_of_autograd_the_optimizer_and_remote_modules_are_excluded() -> None:
    names = {suite.name for suite in SUITES if suite.name.startswith(("autograd", "optimizer", "remote-module"))}
    assert sum(suite in names for suite, _ in excluded()) <= 8


def test_at_least_22_of_the_28_tests_of_the_faulty_agent_are_run() -> None:
    tests = [tuple(names) for names in facts()["tests"] if names[0].startswith("faulty")]
    assert len(tests) == 28
    assert len(set(tests) - set(excluded()) - set(differences())) >= 22


def test_at_least_26_of_the_29_tests_of_the_profiler_are_run() -> None:
    tests = [tuple(names) for names in facts()["tests"] if names[0] == "rpc" and "profil" in names[1]]
    others = {"test_build_rpc_profiling_key", "test_disable_gil_profiling", "test_profiler_rpc_key_names"}
    profiled = {names for names in tests if names[1] not in others}
    assert len(profiled) == 29
    assert len(profiled - set(excluded()) - set(differences())) >= 26


@pytest.mark.timeout(200)
def test_the_runner_reports_a_failure() -> None:
    done = conformance("autograd", "--all", "-k", "test_backward_unused_send_function")
    assert done.returncode == 1
    assert "failed" in done.stdout


@pytest.mark.timeout(200)
def test_an_intended_difference_is_reported_and_is_not_a_failure() -> None:
    done = conformance("rpc", "-k", "test_non_cont_tensors")
    assert done.returncode == 0, done.stdout
    assert done.stdout.split("\ntotal ")[1].split()[:4] == ["0", "0", "1", "0"]
    assert "differs on purpose:\n  rpc: test_non_cont_tensors: " in done.stdout
