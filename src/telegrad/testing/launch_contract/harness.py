"""What every check of a launcher uses: groups that are stopped at the end, and proof that a worker is gone.

Workers and checks share a directory. A worker shows that it runs with a file that it locks; the kernel drops the lock
with the process. Nothing here waits forever: whatever takes longer than the launcher's patience breaks the contract.
"""

from __future__ import annotations

import fcntl
import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from telegrad.launch.base import Group
from telegrad.testing.contract import BrokenPromise, NotApplicable

_POLL = 0.01


@dataclass(frozen=True)
class LauncherUnderTest:
    """A launcher, and what it can do besides the rules for all."""

    start: Callable[..., Group]
    """``start(fn, workers, args, init=...)``; see `telegrad.launch.base`."""
    patience: float = 60.0
    """Seconds for anything that a group does."""
    restarts: bool = False
    """Whether `start` takes `restart`."""
    directory: str | None = None
    """Where workers can write too; None: the system's temporary directory."""


class Harness:
    """Runs one check on one launcher and cleans up after it."""

    def __init__(self, under_test: LauncherUnderTest) -> None:
        # Workers need not import the test kit, and with it torch: most checks are quick so.
        for module in list(sys.modules):
            if module.startswith(__package__ or ""):
                cloudpickle.register_pickle_by_value(sys.modules[module])
        self.under_test = under_test
        self.patience = under_test.patience
        self._stack = ExitStack()
        self.directory = self._stack.enter_context(tempfile.TemporaryDirectory(dir=under_test.directory))
        """Shared with the workers."""

    def close(self) -> None:
        """Stop the groups that were started."""
        self._stack.close()

    def start(self, fn: Callable[..., Any], *args: Any, workers: Any = ("a", "b"), **options: Any) -> Group:
        """Start a group, without `init` unless it is asked for: that takes longer."""
        group = self.under_test.start(fn, workers, args, **{"init": False, **options})
        self._stack.callback(group.stop)
        return group

    def run(self, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Start a group and return its results."""
        with self.start(fn, *args, **options) as group:
            return group.join(self.patience)

    def needs_restarts(self) -> None:
        """Skip the check if the launcher has no restarts."""
        if not self.under_test.restarts:
            raise NotApplicable("this launcher does not start workers again")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds."""
        deadline = time.monotonic() + self.patience
        while not condition():
            if time.monotonic() >= deadline:
                raise BrokenPromise(f"{what} did not happen within {self.patience:g} s")
            threading.Event().wait(_POLL)

    def wait_until_running(self, *names: str) -> None:
        """Wait until these workers have called `hold`."""
        for name in names:
            self.wait_until(Path(self.directory, name).exists, f"the start of {name}")

    def is_running(self, name: str) -> bool:
        """Return whether the worker that called `hold` still lives."""
        with open(Path(self.directory, name)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @contextmanager
    def output(self) -> Iterator[Callable[[], list[str]]]:
        """Collect what this process prints. Yields a function that returns the lines."""
        text = io.StringIO()
        with redirect_stdout(text), redirect_stderr(text):
            yield lambda: text.getvalue().splitlines()


def hold(directory: str, name: str) -> None:
    """Show on a worker that it runs, until its process ends."""
    global _descriptor
    # Locked before it has its name, so nobody finds it unlocked.
    path = Path(directory, name)
    descriptor = os.open(f"{path}.new", os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(f"{path}.new", path)
    _descriptor = descriptor  # stays open


_descriptor: int | None = None


def wait_forever(directory: str) -> None:
    """Show that this worker runs, and never return."""
    hold(directory, this_worker())
    threading.Event().wait()


def this_worker() -> str:
    """Return the name of the worker that runs this, which every launcher puts into the environment."""
    return os.environ["TELEGRAD_NAME"]


def expect(condition: bool, otherwise: str) -> None:
    """Raise a BrokenPromise unless the condition holds."""
    if not condition:
        raise BrokenPromise(otherwise)


Check = Callable[[Harness], None]
