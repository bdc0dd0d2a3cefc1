"""Tells the jobs of Hydra's mpiexec (MPICH, Intel MPI) on one host apart, which it does not number.

All processes of a job on one host descend from one proxy, and no two jobs share it.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROXY = "hydra_pmi_proxy"
_MOST_GENERATIONS = 64


def job() -> str:
    """Return what is equal for all processes of the innermost job on this host; empty if no proxy is to be seen.

    It is not to be seen from a container with process numbers of its own.
    """
    pid = os.getpid()
    for _ in range(_MOST_GENERATIONS):
        try:
            # The name is in parentheses and may contain anything. Then come the state, the parent and others.
            name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").partition("(")[2].rpartition(")")
            fields = rest.split()
        except OSError:  # it has ended, or belongs to somebody who hides it
            return ""
        if name == _PROXY:
            return f"{pid}-{fields[19]}"  # with its start time: another process may get its number later
        pid = int(fields[1])
        if pid == 0:
            return ""
    return ""
