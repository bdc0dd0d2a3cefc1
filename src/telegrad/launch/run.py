"""`telegrad run` starts one script several times on this machine, as the workers of one group.

Each worker is a fresh interpreter in a session of its own. The launcher prints what they print, stops all when one
fails, and passes Ctrl-C on to them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from telegrad.launch.meeting import Meeting
from telegrad.launch.output import PrefixedLines, prefixes
from telegrad.launch.supervision import GRACE, Sink, StopRequests, Supervision, Worker, die_with_launcher


class SpawnedWorker(Worker):
    """A worker that was started as a program."""

    def __init__(self, name: str, rank: int, process: subprocess.Popen[bytes], lifeline: int, sinks: list[Sink]):
        # The pipes belong to the supervision from here on; the Popen must not close them a second time.
        streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
        pipes = dict(zip([os.dup(stream.fileno()) for stream in streams], sinks, strict=True))
        for stream in streams:
            stream.close()
        super().__init__(name, rank, process.pid, os.pidfd_open(process.pid), pipes)
        self._process = process
        self._lifeline = lifeline

    def read_exitcode(self) -> int:
        """Return the exit code, and let the process's number go."""
        return self._process.wait()

    def close(self) -> None:
        """Let go of the lifeline, too."""
        super().close()
        os.close(self._lifeline)


def run(command: Sequence[str], names: Sequence[str], *, prefix: bool = True, grace: float = GRACE) -> int:
    """Run ``python *command`` once for each name, and return the exit code that tells how the group ended.

    It is 0 if every worker ended with 0, else the code of the worker that failed first (128 + N if signal N killed
    it), or 128 + N if signal N to the launcher ended the group. Must be called in the main thread, because it
    handles signals while it runs.
    """
    requests = StopRequests()
    try:
        with _signals_become(requests), Meeting(names) as meeting, Supervision(requests, grace) as supervision:
            printers = [_printers(names, prefix, target) for target in (sys.stdout, sys.stderr)]
            for rank in range(len(names)):
                supervision.add(_start(command, meeting, rank, [sinks[rank] for sinks in printers if sinks]))
            supervision.run()
    finally:
        requests.close()
    if supervision.asked is not None:
        _say(f"stopped by {supervision.asked.name}; no worker is left")
        return 128 + supervision.asked
    if supervision.failure is not None:
        _say(_describe(supervision.failure, others=len(supervision.stopped)))
        return _shell_code(supervision.failure)
    return 0


def _start(command: Sequence[str], meeting: Meeting, rank: int, sinks: list[Sink]) -> SpawnedWorker:
    read_end, write_end = os.pipe()
    output = subprocess.PIPE if sinks else None
    try:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **meeting.environment(rank), "PYTHONUNBUFFERED": "1"},
            pass_fds=[read_end],
            start_new_session=True,
        )
        die_with_launcher(read_end, process.pid)
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return SpawnedWorker(meeting.names[rank], rank, process, write_end, sinks)


def _printers(names: Sequence[str], prefix: bool, target: TextIO) -> list[Sink]:
    """Return one printer for each worker, or none if the workers print for themselves."""
    return [PrefixedLines(text, target) for text in prefixes(names, target)] if prefix else []


@contextlib.contextmanager
def _signals_become(requests: StopRequests) -> Iterator[None]:
    """StreamPosition the signals that ask the launcher to end into requests to stop the group."""
    caught = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Ignored under nohup: the group is to go on.
        caught.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in caught}
    # Python writes the number of every signal it handles to this pipe, also while the loop is waiting.
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


def _describe(worker: Worker, others: int) -> str:
    code = worker.exitcode or 0
    how = f"failed with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    what = f"the others were stopped ({others} still ran)" if others else "no other worker was still running"
    return f"{worker.name} {how}; {what}"


def _say(sentence: str) -> None:
    print(f"telegrad run: {sentence}", file=sys.stderr, flush=True)
