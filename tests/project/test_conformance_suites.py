"""PyTorch's test suites for RPC, distributed autograd, the optimizer and remote modules pass against telegrad."""

from __future__ import annotations

import os
import subprocess
import sys

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
@pytest.mark.parametrize(
    "suites",
    [
        *(["autograd"], ["autograd-tensorpipe"], ["optimizer", "remote-module", "remote-module-three"]),
        # In parts, so that each stays far below its timeout.
        *([*("rpc", "rpc-tensorpipe"), "--part", f"{part}/4"] for part in range(1, 5)),
    ],
    ids=lambda suites: f"{suites[0]}-{suites[-1]}",
)
def test_a_suite_passes(suites: list[str]) -> None:
    done = conformance(*suites)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["1/3", "2/3", "3/3"])
def test_the_device_maps_of_cudas_suites_pass_on_simulated_devices(part: str) -> None:
    if (reason := accelerator.why_unavailable()) is not None:
        pytest.skip(reason)
    done = conformance("--simulate", "-k", "test_device*", "--part", part)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]


def test_every_exception_names_an_existing_test_and_an_allowed_reason() -> None:
    program = "from conformance.suites import SUITES; [print(s.name, t) for s in SUITES for t in s.tests()]"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110, check=True
    )
    there = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert set(excluded()) <= there
    assert set(excluded(simulated=True)) <= there
    assert set(differences()) <= there
    assert not set(excluded()) & set(differences())


def printed_by(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110, check=True
    )
    return done.stdout.splitlines()


def test_every_rpc_suite_of_pytorch_is_listed() -> None:
    program = """
from torch.testing._internal.distributed import rpc_utils
from conformance.suites import SUITES
lists = [value for name, value in vars(rpc_utils).items() if name.endswith("_TESTS")]
ours = {suite.load() for suite in SUITES}
print({cls for tests in lists for cls in tests} == ours, len(lists))
tests = [(suite, test) for suite in SUITES for test in suite.tests()]
needing = sum(suite.needs_cuda(test) for suite, test in tests)
print(len(tests) - needing, needing)
"""
    assert printed_by(program)[-2:] == ["True 5", "465 98"]


def test_a_test_case_can_be_pickled_by_name() -> None:
    program = """
import pickle
from conformance.suites import SUITES, make_case
suite = next(suite for suite in SUITES if suite.name == "parameter-server")
case = make_case(suite, suite.tests()[0])
print(pickle.loads(pickle.dumps(type(case))) is type(case))
"""
    assert printed_by(program)[-1:] == ["True"]


def test_at_most_eight_tests_of_autograd_the_optimizer_and_remote_modules_are_excluded() -> None:
    names = {suite.name for suite in SUITES if suite.name.startswith(("autograd", "optimizer", "remote-module"))}
    assert sum(suite in names for suite, _ in excluded()) <= 8


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
