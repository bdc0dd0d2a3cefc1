"""Runs one worker on a node for a launcher elsewhere, started by srun, mpirun, torchrun or ssh.

It says who it is, gets the work, starts the worker as its child, and passes on what the worker writes. It kills the
worker, with its whole process group, when the launcher says so or is gone. If the runner itself is killed, the kernel
kills the worker. It needs no torch.

With ``--stdio`` it talks to the launcher through its stdin and stdout, otherwise it connects (`Invitation`). It exits
with 0, however the worker ended: mpirun and srun would end the others otherwise. With ``--exit-code`` it exits with 1
if the worker failed: torchrun restarts all workers then.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from telegrad.connection.token_source import DESCRIPTOR_VARIABLE, write_to_descriptor
from telegrad.environment.detection import detect
from telegrad.errors import TelegradError
from telegrad.launch.listening import listen
from telegrad.launch.runner_channel import Channel, ChannelClosed, Invitation, PipeChannel
from telegrad.launch.runner_messages import (
    MARK,
    RESULT,
    STDERR,
    STDOUT,
    Exited,
    Hello,
    HostStore,
    Output,
    Parts,
    Signal,
    Start,
    StoreHosted,
    WorkPart,
)
from telegrad.launch.supervisor import StopRequests, Supervisor
from telegrad.launch.worker import ChildWorker, PipeConsumer, Worker, kill_with_launcher
from telegrad.launch.worker_result import WorkerResult, write_all
from telegrad.transport.ports import PORTS_VARIABLE

RESULT_VARIABLE = "TELEGRAD_RESULT_FD"
WORK_VARIABLE = "TELEGRAD_WORK_FD"
INIT_VARIABLE = "TELEGRAD_INIT"
_CHILD = ["-m", "telegrad.launch.runner_child"]


def main(arguments: Sequence[str]) -> int:
    """Run one worker and return the exit code of this process."""
    with ExitStack() as stack:
        rank, restart, size = _place(arguments)
        host, address = _host(), ""
        if "--stdio" in arguments:
            # What else writes to stdout must not get between the frames. What has done so before ends with the mark.
            write_all(1, MARK)
            channel: Channel = PipeChannel(os.dup(0), os.dup(1))
            os.dup2(2, 1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            address, key = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2], ""
        else:
            invitation = Invitation.take(os.environ)
            channel, key = invitation.connect(), invitation.key
        stack.callback(channel.close)
        channel.send(Hello(rank, host, address, restart, key, size))
        start = _wait_for_start(channel, stack)
        if start is None:
            return 1
        failed = _run(channel, start)
        return 1 if failed and "--exit-code" in arguments else 0


def _host() -> str:
    """Return what is equal for processes that share a loopback interface: containers may share the rest."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/net').st_ino}"


def _place(arguments: Sequence[str]) -> tuple[int, int, int]:
    """Return the rank, the number of starts before, and how many workers the engine has started; 0: unknown."""
    for argument in arguments:
        if argument.startswith("--rank="):
            return int(argument.removeprefix("--rank=")), 0, 0
    detected = detect(os.environ)
    if detected is None or detected.place.rank is None:
        raise TelegradError(
            "no launcher says which worker this is: srun, mpirun or torchrun must set the rank of the processes that "
            "they start, as docs/clusters.md lists it"
        )
    return detected.place.rank, detected.place.restart or 0, detected.place.size or 0


def _wait_for_start(channel: Channel, stack: ExitStack) -> Start | None:
    """Return the work, or None if it is not wanted any more. Hosts the store meanwhile if the launcher asks for it."""
    requests = _Requests(channel)
    parts, start = Parts(), None
    try:
        while start is None:
            for message in requests.wait():
                if isinstance(message, HostStore):
                    channel.send(_host_store(message, stack))
                elif isinstance(message, WorkPart):
                    parts.add(message)
                elif isinstance(message, Start):
                    start = parts.complete(message)
                elif isinstance(message, Signal):  # It may have come together with the work.
                    return None
    except ChannelClosed:
        return None
    return start


def _host_store(message: HostStore, stack: ExitStack) -> StoreHosted:
    """Start a process that hosts the store, and return its port. It ends with this one."""
    try:
        listener = listen(message.ports or os.environ.get(PORTS_VARIABLE, ""), loopback=message.local)
    except (TelegradError, ValueError, OSError) as error:
        return StoreHosted(0, str(error))
    with listener:
        port: int = listener.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "telegrad.launch.store_process", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return StoreHosted(port)


class _Requests(StopRequests):
    """Reads what the launcher says, as requests of the supervisor."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.worker: Worker | None = None

    def fileno(self) -> int:
        return self._channel.fileno()

    def wait(self) -> list[object]:
        """Wait for messages before the worker is started."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.poll()  # ends at the latest when the launcher is gone
        return list(self._channel.receive())

    def read(self) -> list[signal.Signals]:
        """Return the signals that stop the worker. SIGKILL is carried out at once."""
        found = []
        try:
            for message in self._channel.receive():
                if isinstance(message, Signal) and message.number == signal.SIGKILL and self.worker is not None:
                    self.worker.kill()
                elif isinstance(message, Signal):
                    found.append(signal.Signals(message.number))
        except ChannelClosed:
            # The launcher is gone, so nobody needs the worker: kill it at once.
            return [signal.SIGTERM, signal.SIGTERM]
        return found


class _Sender:
    """Passes on what the worker writes to one stream."""

    def __init__(self, channel: Channel, stream: int) -> None:
        self._channel = channel
        self._stream = stream

    def feed(self, piece: bytes) -> None:
        """Send the bytes."""
        try:
            self._channel.send(Output(self._stream, piece))
        except ChannelClosed:
            return  # `_Requests` notices it, too, and kills the worker

    def close(self) -> None:
        """Do nothing: the end of the worker is a message of its own."""


class _ResultSender(_Sender):
    """Passes on the result, and knows whether it is an error."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, RESULT)
        self.result = WorkerResult()

    def feed(self, piece: bytes) -> None:
        """Send the bytes."""
        self.result.feed(piece)
        super().feed(piece)


def _run(channel: Channel, start: Start) -> bool:
    """Run the worker, and return whether it failed."""
    requests = _Requests(channel)
    result = _ResultSender(channel)
    with Supervisor[Worker](requests, start.grace) as supervisor:

        def begin(_: int) -> Worker:
            consumers: list[PipeConsumer] = [_Sender(channel, STDOUT), _Sender(channel, STDERR), result]
            requests.worker = _start_child(start, consumers)
            return requests.worker

        supervisor.start(start.name, begin)
        supervisor.run()
    code = requests.worker.exitcode if requests.worker is not None else None
    try:
        channel.send(Exited(255 if code is None else code))
    except ChannelClosed:
        return True
    return code != 0 or (bool(start.work) and not result.result.complete())


def _start_child(start: Start, consumers: Sequence[PipeConsumer]) -> Worker:
    """Start the worker with pipes for stdout, stderr and its result."""
    with ExitStack() as theirs, ExitStack() as ours:
        ends = []
        for _ in consumers:
            read_end, write_end = os.pipe()
            ours.callback(os.close, read_end)
            theirs.callback(os.close, write_end)
            ends.append((read_end, write_end))
        lifeline, our_lifeline = os.pipe()
        theirs.callback(os.close, lifeline)
        ours.callback(os.close, our_lifeline)
        token, work = write_to_descriptor(start.token), os.memfd_create("telegrad-work", os.MFD_CLOEXEC)
        theirs.callback(os.close, token)
        theirs.callback(os.close, work)
        with os.fdopen(os.dup(work), "wb") as file:
            file.write(start.work)
        result_end = ends[2][1]
        process = subprocess.Popen(
            [sys.executable, *(_CHILD if start.work else start.command)],
            stdin=subprocess.DEVNULL,
            stdout=ends[0][1],
            stderr=ends[1][1],
            env=_environment(start, result_end, work, token),
            cwd=start.directory if os.path.isdir(start.directory) else None,
            pass_fds=[lifeline, token, *([result_end, work] if start.work else [])],
            start_new_session=True,
        )
        kill_with_launcher(lifeline, process.pid)
        ours.pop_all()
        pipes = {read_end: consumer for (read_end, _), consumer in zip(ends, consumers, strict=True)}
        return ChildWorker(start.name, start.rank, process, our_lifeline, pipes)


def _environment(start: Start, result: int, work: int, token: int) -> dict[str, str]:
    existing = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [entry for entry in [*existing, *start.path] if entry and os.path.exists(entry)]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("TELEGRAD_TOKEN")},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **start.environment,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        DESCRIPTOR_VARIABLE: str(token),
        **(_work_variables(result, work, start.init) if start.work else {}),
    }


def _work_variables(result: int, work: int, init: bool) -> dict[str, str]:
    return {RESULT_VARIABLE: str(result), WORK_VARIABLE: str(work), INIT_VARIABLE: str(int(init))}


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TelegradError as problem:
        print(f"telegrad.launch.runner: {problem}", file=sys.stderr)
        sys.exit(1)
