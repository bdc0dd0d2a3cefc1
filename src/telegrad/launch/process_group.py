"""Kills the process group of a worker, and tells when all of it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_group(group: int) -> None:
    """Send SIGKILL to every process of the group."""
    # Nobody is left, or only processes of another user (setuid), which this one may not kill.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def live_processes(group: int) -> list[int]:
    """Return the processes of the group that have not ended. Zombies have: in a container, nobody may reap them."""
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _lives(entry, group))


def _lives(process: Path, group: int) -> bool:
    try:
        # The name in parentheses, which may contain anything, comes before the state, the parent and the group.
        state, _, its_group = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
        if int(its_group) != group:
            return False
        # The main thread of a process can be a zombie while others still run.
        return state not in "ZX" or len(list((process / "task").iterdir())) > 1
    except (FileNotFoundError, ProcessLookupError):  # It has ended while it was read.
        return False
