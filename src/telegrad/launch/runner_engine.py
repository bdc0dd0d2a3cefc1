"""What a group of runners is made of: the work, and the processes of the engine that start the runners."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from telegrad.launch.runner_channel import Channel, PipeChannel
from telegrad.launch.runner_listener import RunnerListener
from telegrad.launch.runner_messages import MARK, Frames
from telegrad.launch.supervisor import GRACE
from telegrad.launch.worker import signal_name


@dataclass(frozen=True)
class Work:
    """What the workers do, and with which environment."""

    names: Sequence[str]
    work: bytes = b""
    """See `telegrad.launch.work`; empty: they run `command`."""
    command: Sequence[str] = ()
    init: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    token: str = field(default="", repr=False)
    directory: str = ""
    path: Sequence[str] = ()
    prefix: bool = True
    grace: float = GRACE


@dataclass
class Engine:
    """The processes that start the runners, and how these reach the launcher."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    channels: Mapping[int, Channel] = field(default_factory=dict)
    """By rank, if each process is the connection to one runner, as with ssh."""
    routes: Sequence[str] = ()
    """By rank, how each of these runners is reached, for errors."""
    listener: RunnerListener | None = None
    restarts: bool = False
    """Whether the engine starts workers that failed again, so only its own end is the end."""
    address: str | None = None
    """Where the host of rank 0 is reached; None: as its runner or its connection says."""

    def ended(self) -> bool:
        """Return whether all processes have ended."""
        return all(process.poll() is not None for process in self.processes)

    def describe_exit(self) -> str:
        """Return how the processes have ended."""
        codes = sorted({process.poll() or 0 for process in self.processes}, key=abs)
        code = codes[-1]
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        return f"{self.name} {how}"


def pipe_channel(process: subprocess.Popen[bytes]) -> Channel:
    """Return the channel to a runner whose stdin and stdout are pipes of this process."""
    assert process.stdin is not None
    assert process.stdout is not None
    channel = PipeChannel(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()), Frames(mark=MARK))
    process.stdin.close()
    process.stdout.close()
    return channel
