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
from typing import BinaryIO, TextIO

from telegrad.connection.token_source import DESCRIPTOR_VARIABLE
from telegrad.environment.launchers import RESTART_VARIABLE
from telegrad.environment.terminal import TERMINAL_VARIABLE
from telegrad.errors import TelegradError
from telegrad.launch.local_rendezvous import LocalRendezvous
from telegrad.launch.output import LoggedOutput, PrefixedLines, prefixes
from telegrad.launch.restarts import RestartPolicy
from telegrad.launch.standard_descriptors import open_missing
from telegrad.launch.supervisor import GRACE, Failure, StopRequests, Supervisor
from telegrad.launch.worker import ChildWorker, PipeConsumer, kill_with_launcher


class SpawnedWorker(ChildWorker):
    """A worker started as a program."""

    def __init__(
        self, name: str, rank: int, process: subprocess.Popen[bytes], lifeline: int, consumers: list[PipeConsumer]
    ) -> None:
        # The supervisor owns the pipes from here on, so the Popen must not close them a second time.
        streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
        pipes = dict(zip([os.dup(stream.fileno()) for stream in streams], consumers, strict=True))
        for stream in streams:
            stream.close()
        super().__init__(name, rank, process, lifeline, pipes)


def run(
    command: Sequence[str],
    names: Sequence[str],
    *,
    prefix: bool = True,
    grace: float = GRACE,
    devices_per_worker: int | None = None,
    restarts: RestartPolicy | None = None,
    keep_going: bool = False,
    attach: str | None = None,
    log_dir: str | None = None,
) -> int:
    """Run ``python *command`` once for each name, and return the exit code of the group.

    It is 0 if every worker exited with 0. Otherwise it is the exit code of the worker that failed first (128 + N if
    signal N killed it), or 128 + N if the launcher received signal N. A worker that dies is started again as far as
    `restarts` allows, by default never. When one fails for good, the others are stopped, unless `keep_going` is true.
    The worker named `attach` gets the standard input and output of this process. With `log_dir`, the output of each
    other worker is also written to the file NAME.log there.
    Must be called in the main thread, because it handles signals while it runs. Raises a ValueError if there are too
    few devices for `devices_per_worker`, and a TelegradError if the group cannot be started.
    """
    open_missing()
    requests = StopRequests()
    restarted = restarts is not None and restarts.limit > 0
    try:
        with (
            signals_request_stop(requests),
            LocalRendezvous(
                names,
                devices_per_worker,
                outlives_workers=keep_going or restarted,
                awaits_replacements=restarted and not keep_going,
            ) as rendezvous,
            _supervisor(requests, grace, restarts, keep_going) as supervisor,
            contextlib.ExitStack() as files,
        ):
            printers = [_printers(names, prefix, target) for target in (sys.stdout, sys.stderr)]
            logs = _open_logs(files, names, log_dir)
            for rank, name in enumerate(names):
                consumers = [by_rank[rank] for by_rank in printers if by_rank and name != attach]
                if logs:
                    consumers = [LoggedOutput(consumer, logs[rank]) for consumer in consumers]
                supervisor.start(name, partial(_start, command, rendezvous, rank, consumers, name == attach))
            supervisor.run()
    finally:
        requests.close()
    if supervisor.stop_signal is not None:
        print_status(f"stopped by {supervisor.stop_signal.name}; all workers have exited")
        return 128 + supervisor.stop_signal
    if supervisor.failures:
        stopped = None if keep_going else len(supervisor.stopped)
        print_status(_describe(supervisor.failures, len(names), stopped))
        return shell_code(supervisor.failures[0].worker.exitcode)
    return 0


def _supervisor(
    requests: StopRequests, grace: float, restarts: RestartPolicy | None, keep_going: bool
) -> Supervisor[SpawnedWorker]:
    return Supervisor(requests, grace, restarts, keep_going=keep_going, report=print_status)


def _start(
    command: Sequence[str],
    rendezvous: LocalRendezvous,
    rank: int,
    consumers: list[PipeConsumer],
    attached: bool,
    restart: int,
) -> SpawnedWorker:
    read_end, write_end = os.pipe()
    output = subprocess.PIPE if consumers else None
    environment = rendezvous.environment(rank)
    if attached:
        environment = {name: environment[name] for name in environment if name != TERMINAL_VARIABLE}
        if environment.get("PYTHONBREAKPOINT") != os.environ.get("PYTHONBREAKPOINT"):
            del environment["PYTHONBREAKPOINT"]
    try:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=None if attached else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={
                **environment,
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


def _open_logs(files: contextlib.ExitStack, names: Sequence[str], log_dir: str | None) -> list[BinaryIO]:
    """Return one file for each worker, or none. What an earlier run has left there is kept."""
    if log_dir is None:
        return []
    try:
        os.makedirs(log_dir, exist_ok=True)
        return [files.enter_context(open(f"{log_dir}/{name}.log", "ab", buffering=0)) for name in names]
    except OSError as error:
        raise TelegradError(
            f"the output of workers cannot be written to {log_dir}: {error}; pass another --log-dir"
        ) from error


def _printers(names: Sequence[str], prefix: bool, target: TextIO | None) -> list[PipeConsumer]:
    """Return one printer for each worker, or none if the workers write to the terminal themselves."""
    return [PrefixedLines(text, target) for text in prefixes(names, target)] if prefix else []


@contextlib.contextmanager
def signals_request_stop(requests: StopRequests) -> Iterator[None]:
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


def shell_code(code: int | None) -> int:
    """Return an exit code as a shell does: 128 + N if signal N killed the process."""
    code = code or 0
    return code if code >= 0 else 128 - code


def _describe(failures: Sequence[Failure[SpawnedWorker]], workers: int, stopped: int | None) -> str:
    """Return what happened to the group. `stopped` workers were stopped by the failure, or None: the others went on."""
    if stopped is not None:
        what = f"{_count(stopped, 'running worker')} stopped" if stopped else "no other worker was running"
        return f"{failures[0].worker.name} {failures[0].description}; {what}"
    each = "; ".join(f"{failure.worker.name} {failure.description}" for failure in failures)
    finished = workers - len(failures)
    return f"{each}; {_count(finished, 'worker') if finished else 'no worker'} finished"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def print_status(sentence: str) -> None:
    """Print what has happened to the group."""
    print(f"telegrad run: {sentence}", file=sys.stderr, flush=True)
