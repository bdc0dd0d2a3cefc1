"""Fixtures for all tests and doctests.

After each of them no thread, child process, socket or file in the runtime directory may be left.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import telegrad
from telegrad.default_agent import acting_as
from telegrad.rpc.token import forget_token
from telegrad.testing import accelerator
from telegrad.testing.group import local_group

# The same examples on every run: a failure then comes from the change under test. To search for new examples, run
# pytest with --hypothesis-profile=search.
hypothesis.settings.register_profile("repeat", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("repeat")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts it like this in the background, and programs of the tests would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore_glob = [
    "src/telegrad/drop_in/*/sitecustomize.py",  # importing it installs the drop-in
    "tests/support/*",  # no tests, and some modules must only be imported by the test that needs them
]
"""Modules that are not imported to look for doctests."""

PATIENCE = 20.0
"""Seconds that threads, processes and sockets get to finish closing."""
STARTED_ONCE = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")
"""Processes that multiprocessing starts on first use and keeps running."""
SERVER = b"tests.support.loaded_interpreter"
"""The process that forks programs for tests, which keeps running as well."""


LONG = (
    "tests/project/test_conformance_suites.py",
    "tests/project/test_benchmarks.py",
    "tests/testing/test_endurance.py",
    "tests/project/test_examples.py",
    "tests/behaviour/network/",
)
"""Tests that take 10 to 60 seconds each. They come first: one that starts last would run while other cores are idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def socket_count() -> int:
    """Return how many sockets this process has open."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except FileNotFoundError:
            continue  # the descriptor that listdir itself used
    return count


def children() -> dict[int, str]:
    """Return the command lines of child processes by pid, and of those forked for a test, without those that stay."""
    found = children_of("self")
    for pid, command in list(found.items()):
        if SERVER in command:
            del found[pid]
            found |= children_of(pid)
    return {
        pid: command.replace(b"\0", b" ").decode(errors="replace").strip() or "(a zombie)"
        for pid, command in found.items()
        if not any(name in command for name in STARTED_ONCE)
    }


def children_of(process: int | str) -> dict[int, bytes]:
    """Return the command lines of the children of a process by pid."""
    found = {}
    for task in os.listdir(f"/proc/{process}/task"):
        try:
            pids = Path(f"/proc/{process}/task/{task}/children").read_text().split()
        except FileNotFoundError:
            continue  # the thread has ended since
        for pid in pids:
            try:
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes()
            except FileNotFoundError:
                continue
    return found


def left_in(directory: Path) -> list[str]:
    """Return the names of telegrad's files in a runtime directory."""
    return sorted(path.name for pattern in ("*.sock", "*.new", "tg-*") for path in directory.glob(pattern))


@pytest.fixture(autouse=True, scope="module")
def fast_collections() -> None:
    """Keep the garbage collector from visiting what torch and the tests loaded, which takes 0.15 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_token_of_another_test() -> Iterator[None]:
    yield
    forget_token()


@pytest.fixture(autouse=True)
def fixed_torch_seed() -> None:
    """Draw the same random tensors on every run: a few in a thousand are too ill-conditioned to compare."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaks a thread, process, socket or file."""
    # Not tmp_path: the path of a unix socket is limited to 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="telegrad-test-"))
    threads, processes, sockets = set(threading.enumerate()), children(), socket_count()
    # Not the monkeypatch fixture: it would undo the test's patches only after the checks below.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TELEGRAD_RUNTIME_DIR", str(directory))
        yield
    deadline = time.monotonic() + PATIENCE
    complaints = []
    for thread in threading.enumerate():
        # A dummy is a thread of torch's engine that has run Python code. The engine keeps its threads.
        if thread not in threads and not thread.name.startswith("Dummy-"):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                complaints.append(f"thread {thread.name!r}")
    for process in multiprocessing.active_children():
        process.join(max(0.0, deadline - time.monotonic()))
    complaints += [f"process {pid}: {command}" for pid, command in children().items() if pid not in processes]
    if socket_count() > sockets:
        # torch's TCPStore closes its socket when it is collected, and pytest would keep a fixture's value alive.
        request.node.funcargs.clear()
        gc.collect()  # for sockets in reference cycles
        while (left := socket_count() - sockets) > 0 and time.monotonic() < deadline:
            threading.Event().wait(0.01)  # torch's own threads close the sockets of a TCPStore
        if left > 0:
            complaints.append(f"{left} open sockets")
    complaints += [f"{name} in the runtime directory" for name in left_in(directory)]
    shutil.rmtree(directory)
    if complaints:
        pytest.fail("the test left behind: " + "; ".join(complaints))


@pytest.fixture(autouse=True)
def doctest_names(
    request: pytest.FixtureRequest, doctest_namespace: dict[str, Any], nothing_is_left: None
) -> Iterator[None]:
    """Give doctests `torch` and `telegrad`, and a group if they name `worker1`: they then run on `worker0`."""
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    doctest_namespace.update(torch=torch, telegrad=telegrad)
    if '"worker1' not in (request.node.dtest.docstring or ""):
        yield
        return
    with local_group(["worker0", "worker1"]) as agents, acting_as(agents["worker0"]):
        yield


@pytest.fixture
def sim() -> Iterator[None]:
    """Add the simulated devices sim:0 and sim:1 to this process, or skip the test if there is no compiler.

    They stay for all later tests of the process. That changes nothing for tests that use the CPU only.
    """
    if (reason := accelerator.why_unavailable()) is not None:
        pytest.skip(reason)
    accelerator.install()
    accelerator.reset_copies()
    yield
    accelerator.set_asynchronous(False)
    torch.accelerator.set_device_index(0)


@pytest.fixture
def asynchronous_sim(sim: None) -> None:
    """Like `sim`, and every non-blocking copy is delayed until the program waits for it."""
    accelerator.set_asynchronous(True)
