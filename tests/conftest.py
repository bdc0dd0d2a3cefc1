"""After every test, nothing may be left: no thread, no child process, no socket, no file in the runtime directory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# The same examples on every run, so that a change is judged by what it changed. New ones are sought by whoever runs
# pytest with --hypothesis-profile=search.
hypothesis.settings.register_profile("repeat", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("repeat")

PATIENCE = 20.0
"""Seconds for threads, processes and sockets that are ending already."""
STARTED_ONCE = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")
"""Processes that multiprocessing starts when first needed, and keeps."""


def socket_count() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except FileNotFoundError:
            continue  # the handle of this very listing
    return count


def children() -> dict[int, str]:
    """Child processes with their command lines, without those that stay."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{task}/children").read_text().split()
        except FileNotFoundError:
            continue  # a thread that has ended since
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except FileNotFoundError:
                continue
            if not any(name in command for name in STARTED_ONCE):
                found[int(pid)] = (
                    command.replace(b"\0", b" ").decode(errors="replace").strip() or "(ended, not waited for)"
                )
    return found


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for pattern in ("*.sock", "*.new", "tg-*") for path in directory.glob(pattern))


@pytest.fixture(autouse=True)
def the_same_numbers() -> None:
    """Tensors of random numbers are the same on every run: one in some hundred is too ill-conditioned to compare."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    # Not tmp_path: the path of a unix socket has 107 bytes at most.
    directory = Path(tempfile.mkdtemp(prefix="telegrad-test-"))
    threads, processes, sockets = set(threading.enumerate()), children(), socket_count()
    # Not the fixture of that name: it would undo what the test patched only after we have looked.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TELEGRAD_RUNTIME_DIR", str(directory))
        yield
    deadline = time.monotonic() + PATIENCE
    complaints = []
    for thread in threading.enumerate():
        if thread not in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                complaints.append(f"thread {thread.name!r}")
    for process in multiprocessing.active_children():
        process.join(max(0.0, deadline - time.monotonic()))
    complaints += [f"process {pid}: {command}" for pid, command in children().items() if pid not in processes]
    if socket_count() > sockets:
        # What is closed by dying (torch's TCPStore) may be a fixture's value, which pytest would hold until later.
        request.node.funcargs.clear()
        gc.collect()  # a socket in a cycle is closed when the cycle is found
        while (left := socket_count() - sockets) > 0 and time.monotonic() < deadline:
            threading.Event().wait(0.01)  # torch's own threads close those of a TCPStore
        if left > 0:
            complaints.append(f"{left} open sockets")
    complaints += [f"{name} in the runtime directory" for name in left_in(directory)]
    shutil.rmtree(directory)
    if complaints:
        pytest.fail("the test left behind: " + "; ".join(complaints))
