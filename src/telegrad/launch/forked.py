"""Forks workers from a server process that has already loaded torch, so dozens of them start in a second or two.

The server is multiprocessing's forkserver. Workers are not started with multiprocessing's `Process` class, for two
reasons. A process started by it imports the user's main script again, which would start the group again if the script
has no guard. And any other user of multiprocessing in the same program polls it. So this module sends the server what
the class would send: the preparation data without the main script, and the object whose `_bootstrap` the child calls.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver

from telegrad.connection.token_source import DESCRIPTOR_VARIABLE, TOKEN_VARIABLE
from telegrad.launch import worker_result
from telegrad.launch.standard_descriptors import open_missing
from telegrad.launch.work import run_work, without_frames_of
from telegrad.launch.worker import PipeConsumer, Worker, kill_with_launcher, launcher_is_gone, signal_name
from telegrad.launch.worker_result import WorkerResult, write_all

# The server skips a module that it cannot import; then each worker loads it.
PRELOAD = [
    "torch",
    "torch.distributed",
    "telegrad",
    "telegrad.rpc",
    "telegrad.launch",
    # What init_rpc imports in a group with a token, as every group of a launcher is.
    "telegrad.transport.relay",
    "telegrad.transport.tls",
    "encodings.idna",
]


class ForkedWorker(Worker):
    """A worker forked from the server."""

    def __init__(
        self, name: str, rank: int, pid: int, status: int, lifeline: int, pipes: Mapping[int, PipeConsumer]
    ) -> None:
        super().__init__(name, rank, pid, status, pipes, lifeline)
        self.result = next(consumer for consumer in pipes.values() if isinstance(consumer, WorkerResult))
        self.killed_on_purpose = False

    def failed(self) -> bool:
        """Return whether the function raised or the process died. Being killed on purpose is not a failure."""
        if self.killed_on_purpose:
            return False
        return self.result.is_error() or (self.exitcode is not None and not self.succeeded())

    @property
    def ended(self) -> bool:
        """Whether the process has exited."""
        return self.exitcode is not None

    def succeeded(self) -> bool:
        """Return whether the function returned and the process exited with 0."""
        return self.exitcode == 0 and self.result.complete() and not self.result.is_error()

    def describe_exit(self) -> str:
        """Return how this worker failed, as in "raised ValueError: x"."""
        if self.result.is_error():
            return f"raised {self.result.raised().summary}"
        code = self.exitcode or 0
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        return f"{how} before its function returned"

    def details(self) -> str:
        """Return the traceback of the exception that the function raised, if it did."""
        return self.result.raised().traceback if self.result.is_error() else ""

    def read_exitcode(self) -> int:
        """Return the exit code that the server sent."""
        try:
            return int(forkserver.read_signed(self.exit_fd))
        except EOFError:
            return 255  # The server died and nobody else knows the exit code. Multiprocessing returns 255 here too.


@dataclass(frozen=True)
class Startup:
    """Everything that a worker needs to start. The forked process unpickles it and calls its `_bootstrap`."""

    name: str
    # Not in the repr, which may end up in logs: both may contain secrets of the user.
    environment: Mapping[str, str] = field(repr=False)
    work: bytes = field(repr=False)
    """The pickled function, its arguments and the options of init_rpc. Unpickled after everything else is set up."""
    init: bool

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the worker in this new process and return its exit code."""
        return _Process(self, parent_sentinel)._bootstrap(parent_sentinel)  # type: ignore[attr-defined, no-any-return]  # typeshed does not know it; the forkserver itself starts processes by this method


def start_server() -> None:
    """Start the server if it is not running, without waiting for it: it loads torch while this process does."""
    open_missing()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    # The server and all its workers would show a token of this process in /proc/PID/environ.
    token = os.environ.pop(TOKEN_VARIABLE, None)
    try:
        forkserver.ensure_running()
    finally:
        if token is not None:
            os.environ[TOKEN_VARIABLE] = token


def interpreter_state() -> dict[str, object]:
    """Return what a worker takes over from this interpreter: where modules are found, arguments, and the directory."""
    return {"sys_path": [entry or os.getcwd() for entry in sys.path], "sys_argv": list(sys.argv), "dir": os.getcwd()}


def fork_worker(
    startup: Startup,
    interpreter: Mapping[str, object],
    rank: int,
    token: int,
    stdout: PipeConsumer | None,
    stderr: PipeConsumer | None,
) -> ForkedWorker:
    """Fork one worker from the server. Without a consumer for its output, it writes to this process's output.

    `interpreter` is an `interpreter_state`. `token` is a descriptor of the group's token; see
    `telegrad.connection.token_source`.
    """
    pipes: dict[int, PipeConsumer] = {}
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        passed = []
        for consumer, inherited in ((stdout, 1), (stderr, 2), (WorkerResult(), None)):
            if consumer is None:
                passed.append(inherited)
                continue
            read_end, write_end = os.pipe()
            ours.callback(os.close, read_end)
            theirs.callback(os.close, write_end)
            pipes[read_end] = consumer
            passed.append(write_end)
        status, data = forkserver.connect_to_new_process([*(fd for fd in passed if fd is not None), token])
        ours.callback(os.close, status)
        # The child uses the other end of this pipe as its lifeline, so it stays open as long as the worker lives.
        ours.callback(os.close, data)
        pid = forkserver.read_signed(status)
        preparation = {"name": startup.name, **interpreter}
        # If the child dies before it has read everything, its exit code reports that.
        with contextlib.suppress(BrokenPipeError):
            write_all(data, pickle.dumps(preparation) + pickle.dumps(startup))
        worker = ForkedWorker(startup.name, rank, pid, status, data, pipes)
        ours.pop_all()
    return worker


class _Process(multiprocessing.Process):
    """The worker inside its own process. Derived from multiprocessing's class, whose cleanup at exit it needs."""

    def __init__(self, startup: Startup, lifeline: int) -> None:
        super().__init__(name=startup.name)
        self._startup = startup
        self._lifeline = lifeline

    def run(self) -> None:
        """Set up the process, call the function, and send its result."""
        os.setsid()
        kill_with_launcher(self._lifeline, os.getpgrp())
        if launcher_is_gone(self._lifeline):
            os.kill(os.getpid(), signal.SIGKILL)
        stdout, stderr, result_pipe, token = forkserver.get_inherited_fds() or []
        _redirect_output(stdout, stderr)
        os.set_inheritable(result_pipe, False)
        os.set_inheritable(token, False)
        os.environ.clear()
        os.environ.update(self._startup.environment)
        os.environ[DESCRIPTOR_VARIABLE] = str(token)
        _reset_torch_and_numpy()
        try:
            value = run_work(self._startup.work, self._startup.name, init=self._startup.init)
            _flush_output()
            worker_result.write_value(result_pipe, value)
        except BaseException as error:  # noqa: BLE001 - sent to the launcher
            _flush_output()
            worker_result.write_error(result_pipe, without_frames_of(error, [__file__]))
            sys.exit(1)


def _redirect_output(stdout: int, stderr: int) -> None:
    for received, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(received, standard)
        os.close(received)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a new process has Python's own streams


def _flush_output() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _reset_torch_and_numpy() -> None:
    """Reset state copied by the fork: the server loaded both before this worker had its environment."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # Otherwise all workers would draw the same numbers.
