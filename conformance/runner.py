"""Runs tests of the suites, several at a time, each in a process forked from this one, which has torch loaded.

A test of PyTorch's starts four workers. Started as programs they take seconds each, most of it to import torch; forked
from here they are there at once. Each test gets a session of its own, so that nothing it started outlives it.
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

from conformance.suites import Suite, make_case

LIMIT = 150.0
"""Seconds that a test may take: none needs a third of it on a loaded machine."""


@dataclass(frozen=True)
class Outcome:
    """How one test ended."""

    suite: str
    test: str
    verdict: str
    """passed, failed, differs (failed, as it must where telegrad means to differ), or skipped (by the suite itself)."""
    text: str
    """Why it failed or was skipped."""
    seconds: float
    output: str
    """What its processes printed."""

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
    on_end: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run the tests, `jobs` at a time, and give their outcomes in the order in which they ended.

    A test that is in `differ`, by suite and name, differs if it fails.
    """
    waiting = list(tests)[::-1]
    running: list[_Running] = []
    outcomes: list[Outcome] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(*waiting.pop()))
            _wait(running, limit)
            for one in [one for one in running if _ended(one) or time.monotonic() - one.started > limit]:
                running.remove(one)
                outcome = _end(one, limit)
                if outcome.verdict == "failed" and outcome.name in differ:
                    outcome = replace(outcome, verdict="differs")
                outcomes.append(outcome)
                on_end(outcome)
    finally:
        for one in running:
            _end(one, 0.0)
    return outcomes


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
        # Else a test of DDP may call a worker whose init_process_group has not returned, though its own has.
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
        tempfile.tempdir = str(directory)  # the suites leave their rendezvous files behind
        os.environ["TELEGRAD_RUNTIME_DIR"] = str(directory)  # and workers that are killed their sockets
        if suite.agent == "faulty":  # some of its faults break connections, which only sessions over tcp survive
            os.environ["TELEGRAD_TRANSPORTS"] = "tcp"
            os.environ["TELEGRAD_TOKEN"] = secrets.token_hex(32)
        verdict, text = _run_case(make_case(suite, test))
    except BaseException:  # noqa: BLE001 - a fork must never go on as the runner
        verdict, text = "failed", traceback.format_exc()
    with contextlib.suppress(BaseException):
        (directory / "verdict").write_text(json.dumps([verdict, text]))
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
        return "failed", "it was expected to fail, and did not"
    return "passed", ""


def _wait(running: list[_Running], limit: float) -> None:
    """Until one of them ends, or is over its limit."""
    poller = select.poll()
    for one in running:
        poller.register(one.pidfd, select.POLLIN)
    left = min(one.started for one in running) + limit - time.monotonic()
    poller.poll(max(0.0, left) * 1000 + 10)


def _ended(one: _Running) -> bool:
    poller = select.poll()
    poller.register(one.pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _end(one: _Running, limit: float) -> Outcome:
    """Read what came of a test, and leave nothing of it."""
    seconds = time.monotonic() - one.started
    in_time = _ended(one)
    if not in_time and limit:  # what it hangs in goes to its output
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGUSR1)
        time.sleep(1.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)
    os.waitpid(one.pid, 0)
    os.close(one.pidfd)
    try:
        verdict, text = json.loads((one.directory / "verdict").read_text())
    except FileNotFoundError:
        verdict, text = "failed", "its process died" if in_time else f"it did not end within {limit:g} s"
    with contextlib.suppress(FileNotFoundError):
        output = (one.directory / "output").read_text(errors="replace")
    shutil.rmtree(one.directory, ignore_errors=True)
    return Outcome(one.suite.name, one.test, verdict, text, seconds, output)
