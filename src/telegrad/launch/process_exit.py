"""Names a process so that others can find it, and waits until it has ended."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """A process. Another one may get its number when it has ended, so its start time counts, too."""

    machine: str
    """Names the kernel and the namespace in which the number is valid."""
    pid: int
    started: int


def this_process() -> ProcessId:
    """Return the identity of this process.

    >>> wait_for_exit(this_process(), 0.01)
    False
    """
    return ProcessId(this_machine(), os.getpid(), _start_time(os.getpid()))


def this_machine() -> str:
    """Return what `ProcessId.machine` is for processes that this one can see."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def wait_for_exit(process: ProcessId, timeout: float) -> bool:
    """Return whether the process, which is on this machine, has ended within `timeout` seconds."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if _start_time(process.pid) != process.started:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(descriptor)


def _start_time(pid: int) -> int:
    """Return when a process was started, in the kernel's units; -1 if there is none."""
    try:
        # The name in parentheses may contain anything. After it come 19 other fields.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return -1
