"""Runs a function on the workers of a new group, as the tasks of one `srun`.

Outside an allocation, srun makes one, and waits in the queue for it. Inside one (salloc, or a script of sbatch), it
uses that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from telegrad.launch.engines import RUNNER, EngineOptions, start_by_command
from telegrad.launch.runner_group import RunnerGroup


def start(
    fn: Callable[..., Any],
    workers: int | Sequence[str],
    args: Sequence[Any] = (),
    *,
    address: str | None = None,
    **others: Unpack[EngineOptions],
) -> RunnerGroup:
    """Start a group like `telegrad.launch.start`, by srun: with `prefix`, `init` and `init_options` as there.

    `options` are srun's, as in ``["--partition=gpu", "--ntasks-per-node=8", "--gpus-per-task=1"]``. `address` is one of
    this machine that the nodes can reach, if not the first that answers. All must be connected after `start_timeout`
    seconds (600).
    """

    def command(tasks: int, options: Sequence[str]) -> Sequence[str]:
        # A task that fails does not end the others: the launcher decides.
        return ["srun", f"--ntasks={tasks}", "--kill-on-bad-exit=0", *options, sys.executable, *RUNNER]

    return start_by_command("srun", command, fn, workers, args, address=address, **others)
