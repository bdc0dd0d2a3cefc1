"""Workers fork from a server process that has loaded torch already, so that dozens of them start in a second or two.

The server is multiprocessing's own forkserver. Its `Process` class is not used to start workers, because a process
started by it imports the user's main script again (which starts the group again, if the script has no guard), and
because it is polled by whoever uses multiprocessing in the same program. So what the class would send to the server
is sent from here: a description of the surroundings without the main script, and the object whose `_bootstrap` the
child calls.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from typing import Any

import cloudpickle

from telegrad.launch import report
from telegrad.launch.report import Report
from telegrad.launch.supervision import Sink, Worker, die_with_launcher, is_cut

# A module that cannot be imported is skipped by the server, and then loaded by each worker.
PRELOAD = ["torch", "torch.distributed", "telegrad", "telegrad.rpc", "telegrad.launch"]


class ForkedWorker(Worker):
    """A worker that was forked from the server."""

    def __init__(self, name: str, rank: int, pid: int, status: int, lifeline: int, pipes: Mapping[int, Sink]) -> None:
        super().__init__(name, rank, pid, status, pipes)
        self.report = next(sink for sink in pipes.values() if isinstance(sink, Report))
        self.killed_on_purpose = False
        self._lifeline = lifeline

    def failed(self) -> bool:
        """Return whether the function raised, or the process died. To be killed on purpose is no failure."""
        if self.killed_on_purpose:
            return False
        return self.report.is_error() or (self.exitcode is not None and not self.succeeded())

    def succeeded(self) -> bool:
        """Return whether the function returned and the process ended well."""
        return self.exitcode == 0 and self.report.complete() and not self.report.is_error()

    def read_exitcode(self) -> int:
        """Return the exit code, which the server has sent."""
        try:
            return int(forkserver.read_signed(self.exit_fd))
        except EOFError:
            return 255  # The server is gone, and with it whoever knew. Multiprocessing says 255 here, too.

    def close(self) -> None:
        """Let go of the lifeline, too."""
        super().close()
        os.close(self._lifeline)


@dataclass(frozen=True)
class Startup:
    """All that a worker needs to know; the forked process reads it and calls its `_bootstrap`."""

    name: str
    # Not in the repr, which ends up in logs: both may hold the group's token.
    environment: Mapping[str, str] = field(repr=False)
    work: bytes = field(repr=False)
    """The function, its arguments and init_rpc's options, pickled: read only when everything else is arranged."""
    init: bool

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the worker in this fresh process, and return its exit code."""
        return _Process(self, parent_sentinel)._bootstrap(parent_sentinel)  # type: ignore[attr-defined, no-any-return]  # typeshed does not know it; the forkserver itself starts processes by this method


def start_server() -> None:
    """Start the server, if it does not run, and do not wait for it: it loads torch while this process does so, too."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def fork_worker(startup: Startup, rank: int, stdout: Sink | None, stderr: Sink | None) -> ForkedWorker:
    """Fork one worker from the server. Where a sink for its output is None, it writes to where this process writes."""
    pipes: dict[int, Sink] = {}
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        handed_over = []
        for sink, inherited in ((stdout, 1), (stderr, 2), (Report(), None)):
            if sink is None:
                handed_over.append(inherited)
                continue
            read_end, write_end = os.pipe()
            ours.callback(os.close, read_end)
            theirs.callback(os.close, write_end)
            pipes[read_end] = sink
            handed_over.append(write_end)
        status, data = forkserver.connect_to_new_process([fd for fd in handed_over if fd is not None])
        ours.callback(os.close, status)
        # The child arms the other end of this pipe as its lifeline, so it stays open as long as the worker lives.
        ours.callback(os.close, data)
        pid = forkserver.read_signed(status)
        surroundings = {
            "name": startup.name,
            "sys_path": [entry or os.getcwd() for entry in sys.path],
            "sys_argv": sys.argv,
            "dir": os.getcwd(),
        }
        # A child that dies before it has read everything is seen by its exit code, like any other.
        with contextlib.suppress(BrokenPipeError):
            _write_all(data, pickle.dumps(surroundings) + pickle.dumps(startup))
        worker = ForkedWorker(startup.name, rank, pid, status, data, pipes)
        ours.pop_all()
    return worker


class _Process(multiprocessing.Process):
    """The worker as it sees itself. Multiprocessing's own class, so that its clean-up at exit is done as usual."""

    def __init__(self, startup: Startup, lifeline: int) -> None:
        super().__init__(name=startup.name)
        self._startup = startup
        self._lifeline = lifeline

    def run(self) -> None:
        """Arrange the surroundings, call the function, and report."""
        os.setsid()
        die_with_launcher(self._lifeline, os.getpgrp())
        if is_cut(self._lifeline):
            os.kill(os.getpid(), signal.SIGKILL)
        stdout, stderr, report_pipe = forkserver.get_inherited_fds() or []
        _take_over_output(stdout, stderr)
        os.set_inheritable(report_pipe, False)
        os.environ.clear()
        os.environ.update(self._startup.environment)
        _settle_torch_and_numpy()
        try:
            value = _work(self._startup)
            _flush_output()
            report.write_value(report_pipe, value)
        except BaseException as error:  # noqa: BLE001 - whatever ends the function is told to the launcher
            _flush_output()
            report.write_error(report_pipe, _without_our_frames(error))
            sys.exit(1)


def _work(startup: Startup) -> object:
    function: Callable[..., object]
    arguments: Sequence[object]
    options: Mapping[str, Any]
    function, arguments, options = cloudpickle.loads(startup.work)
    if not startup.init:
        return function(*arguments)
    from telegrad import rpc

    rpc.init_rpc(startup.name, **options)
    value = function(*arguments)
    rpc.shutdown()
    return value


def _take_over_output(stdout: int, stderr: int) -> None:
    for received, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(received, standard)
        os.close(received)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a fresh process has Python's own streams


def _without_our_frames(error: BaseException) -> BaseException:
    """Let the traceback begin where the user's code does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)


def _flush_output() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _settle_torch_and_numpy() -> None:
    """Undo what fork copied: both were loaded by the server, before this worker had its environment."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # Else all workers would draw the same numbers.


def _write_all(pipe: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(pipe, rest) :]
