"""`telegrad run`: starts one script several times on this machine, as the workers of one group.

Each worker is a new interpreter in its own session. The launcher prints the workers' output, starts dead ones again
if it is asked to, stops all when one fails for good, and forwards Ctrl-C to them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TextIO

from telegrad.connection.token_source import DESCRIPTOR_VARIABLE
from telegrad.launch.local_rendezvous import RESTART_VARIABLE, LocalRendezvous
from telegrad.launch.output import PrefixedLines, prefixes
from telegrad.launch.restarts import RestartPolicy
from telegrad.launch.supervisor import GRACE, Failure, StopRequests, Supervisor
from telegrad.launch.worker import PipeConsumer, Worker, kill_with_launcher


class SpawnedWorker(Worker):
    """A worker started as a program."""

    def __init__(
        self, name: str, rank: int, process: subprocess.Popen[bytes], lifeline: int, consumers: list[PipeConsumer]
    ) -> None:
        # The supervisor owns the pipes from here on, so the Popen must not close them a second time.
        streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
        pipes = dict(zip([os.dup(stream.fileno()) for stream in streams], consumers, strict=True))
        for stream in streams:
            stream.close()
        super().__init__(name, rank, process.pid, os.pidfd_open(process.pid), pipes)
        self._process = process
        self._lifeline = lifeline

    def read_exitcode(self) -> int:
        """Return the exit code and reap the process."""
        return self._process.wait()

    def close(self) -> None:
        """Close the lifeline too."""
        super().close()
        os.close(self._lifeline)


def run(
    command: Sequence[str],
    names: Sequence[str],
    *,
    prefix: bool = True,
    grace: float = GRACE,
    devices_per_worker: int | None = None,
    restarts: RestartPolicy | None = None,
    keep_going: bool = False,
) -> int:
    """Run ``python *command`` once for each name, and return the exit code of the group.

    It is 0 if every worker exited with 0. Otherwise it is the exit code of the worker that failed first (128 + N if
    signal N killed it), or 128 + N if the launcher received signal N. A worker that dies is started again as far as
    `restarts` allows, by default never. When one fails for good, the others are stopped, unless `keep_going` is true.
    Must be called in the main thread, because it handles signals while it runs. Raises a ValueError if there are too
    few devices for `devices_per_worker`.
    """
    requests = StopRequests()
    outlives_workers = keep_going or (restarts is not None and restarts.limit > 0)
    try:
        with (
            _signals_request_stop(requests),
            LocalRendezvous(names, devices_per_worker, outlives_workers=outlives_workers) as rendezvous,
            Supervisor(requests, grace, restarts, keep_going=keep_going, report=_print_status) as supervisor,
        ):
            printers = [_printers(names, prefix, target) for target in (sys.stdout, sys.stderr)]
            for rank, name in enumerate(names):
                consumers = [by_rank[rank] for by_rank in printers if by_rank]
                supervisor.start(name, partial(_start, command, rendezvous, rank, consumers))
            supervisor.run()
    finally:
        requests.close()
    if supervisor.stop_signal is not None:
        _print_status(f"stopped by {supervisor.stop_signal.name}; all workers have exited")
        return 128 + supervisor.stop_signal
    if supervisor.failures:
        stopped = None if keep_going else len(supervisor.stopped)
        _print_status(_describe(supervisor.failures, len(names), stopped))
        return _shell_code(supervisor.failures[0].worker)
    return 0


def _start(
    command: Sequence[str], rendezvous: LocalRendezvous, rank: int, consumers: list[PipeConsumer], restart: int
) -> SpawnedWorker:
    read_end, write_end = os.pipe()
    output = subprocess.PIPE if consumers else None
    try:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={
                **rendezvous.environment(rank),
                RESTART_VARIABLE: str(restart),
                DESCRIPTOR_VARIABLE: str(rendezvous.token_descriptor),
                "PYTHONUNBUFFERED": "1",
            },
            pass_fds=[read_end, rendezvous.token_descriptor],
            start_new_session=True,
        )
        kill_with_launcher(read_end, process.pid)
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return SpawnedWorker(rendezvous.names[rank], rank, process, write_end, consumers)


def _printers(names: Sequence[str], prefix: bool, target: TextIO) -> list[PipeConsumer]:
    """Return one printer for each worker, or none if the workers write to the terminal themselves."""
    return [PrefixedLines(text, target) for text in prefixes(names, target)] if prefix else []


@contextlib.contextmanager
def _signals_request_stop(requests: StopRequests) -> Iterator[None]:
    """Turn signals that terminate the launcher into requests to stop the group."""
    caught = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Ignored under nohup, where the group must continue.
        caught.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in caught}
    # Python writes the number of every signal it handles to this pipe, which wakes the loop.
    wakeup = signal.set_wakeup_fd(requests.write_end, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)


def _shell_code(worker: Worker) -> int:
    code = worker.exitcode or 0
    return code if code >= 0 else 128 - code


def _describe(failures: Sequence[Failure], workers: int, stopped: int | None) -> str:
    """Return what happened to the group. `stopped` workers were stopped by the failure, or None: the others went on."""
    if stopped is not None:
        what = f"{_count(stopped, 'running worker')} stopped" if stopped else "no other worker was running"
        return f"{failures[0].worker.name} {failures[0].description}; {what}"
    each = "; ".join(f"{failure.worker.name} {failure.description}" for failure in failures)
    finished = workers - len(failures)
    return f"{each}; {_count(finished, 'worker') if finished else 'no worker'} finished"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _print_status(sentence: str) -> None:
    print(f"telegrad run: {sentence}", file=sys.stderr, flush=True)
