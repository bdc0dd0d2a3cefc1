"""Runs tests of the suites in parallel, each in a process forked from this one, which has already loaded torch.

A test of PyTorch's suites starts four workers. As new interpreters they would take seconds each, mostly to import
torch. Forked from here they start immediately. Each test gets its own session, so that no process outlives it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.suites import Suite, load_torch_test_kit, make_case

LIMIT = 150.0
"""Time limit of a test in seconds. None needs a third of it, even on a loaded machine."""


@dataclass(frozen=True)
class TestRun:
    """The result of one test."""

    suite: str
    test: str
    status: str
    """passed, failed, differs (failed, because telegrad differs on purpose), or skipped (by the suite itself)."""
    text: str
    """Why it failed or was skipped."""
    seconds: float
    output: str
    """The output of its processes."""

    @property
    def name(self) -> tuple[str, str]:
        """Suite and test."""
        return self.suite, self.test


@dataclass
class _Running:
    suite: Suite
    test: str
    pid: int
    pidfd: int
    started: float
    directory: Path


def run(
    tests: Iterable[tuple[Suite, str]],
    *,
    jobs: int,
    limit: float = LIMIT,
    differ: Container[tuple[str, str]] = (),
    on_end: Callable[[TestRun], None],
) -> list[TestRun]:
    """Run the tests, `jobs` at a time, and return their results in the order in which they ended.

    A failed test that is in `differ`, by suite and name, has the status "differs".
    """
    load_torch_test_kit()
    waiting = list(tests)[::-1]
    running: list[_Running] = []
    results: list[TestRun] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(*waiting.pop()))
            _wait(running, limit)
            for one in [one for one in running if _ended(one) or time.monotonic() - one.started > limit]:
                running.remove(one)
                result = _end(one, limit)
                if result.status == "failed" and result.name in differ:
                    result = replace(result, status="differs")
                results.append(result)
                on_end(result)
    finally:
        for one in running:
            _end(one, 0.0)
    return results


def _start(suite: Suite, test: str) -> _Running:
    directory = Path(tempfile.mkdtemp(prefix="conformance-"))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _in_child(suite, test, directory)
    return _Running(suite, test, pid, os.pidfd_open(pid), time.monotonic(), directory)


def _in_child(suite: Suite, test: str, directory: Path) -> None:
    try:
        os.setsid()
        output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        # Without this, a DDP test may call a worker whose init_process_group has not returned yet.
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
        tempfile.tempdir = str(directory)  # the suites do not remove their rendezvous files
        os.environ["TELEGRAD_RUNTIME_DIR"] = str(directory)  # and killed workers do not remove their sockets
        if suite.agent == "faulty":  # some of its faults break connections, and only tcp sessions resume
            os.environ["TELEGRAD_TRANSPORTS"] = "tcp"
            os.environ["TELEGRAD_TOKEN"] = secrets.token_hex(32)
        status, text = _run_case(make_case(suite, test))
    except BaseException:  # noqa: BLE001 - a forked child must never continue as the runner
        status, text = "failed", traceback.format_exc()
    with contextlib.suppress(BaseException):
        (directory / "result").write_text(json.dumps([status, text]))
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _run_case(case: unittest.TestCase) -> tuple[str, str]:
    result = unittest.TestResult()
    case.run(result)
    for _, text in [*result.errors, *result.failures]:
        return "failed", text
    for _, reason in result.skipped:
        return "skipped", reason
    if result.unexpectedSuccesses:
        return "failed", "it was expected to fail, but passed"
    return "passed", ""


def _wait(running: list[_Running], limit: float) -> None:
    """Wait until one of them ends or exceeds its time limit."""
    poller = select.poll()
    for one in running:
        poller.register(one.pidfd, select.POLLIN)
    left = min(one.started for one in running) + limit - time.monotonic()
    poller.poll(max(0.0, left) * 1000 + 10)


def _ended(one: _Running) -> bool:
    poller = select.poll()
    poller.register(one.pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _end(one: _Running, limit: float) -> TestRun:
    """Read the result of a test, kill its processes and remove its files."""
    seconds = time.monotonic() - one.started
    in_time = _ended(one)
    if not in_time and limit:  # write the stacks of a hanging test to its output
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGUSR1)
        time.sleep(1.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)
    os.waitpid(one.pid, 0)
    os.close(one.pidfd)
    try:
        status, text = json.loads((one.directory / "result").read_text())
    except FileNotFoundError:
        status, text = "failed", "its process died" if in_time else f"it did not finish within {limit:g} s"
    with contextlib.suppress(FileNotFoundError):
        output = (one.directory / "output").read_text(errors="replace")
    shutil.rmtree(one.directory, ignore_errors=True)
    return TestRun(one.suite.name, one.test, status, text, seconds, output)
