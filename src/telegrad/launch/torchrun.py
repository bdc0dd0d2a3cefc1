"""Runs a function on the workers of a new group on this machine, which torchrun starts and restarts."""

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
    restart: int = 0,
    **others: Unpack[EngineOptions],
) -> RunnerGroup:
    """Start a group like `telegrad.launch.start`, by torchrun: with `prefix`, `init` and `init_options` as there.

    When a worker fails, torchrun stops all and starts all again, at most `restart` times. `options` are those of
    torchrun. All must be connected after `start_timeout` seconds (600).
    """

    def command(workers: int, options: Sequence[str]) -> Sequence[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"),
            # Without restarts, a worker that ends does not end the others: the launcher decides.
            *(f"--max-restarts={restart}", *options, *RUNNER, *(["--exit-code"] if restart else [])),
        ]

    return start_by_command("torchrun", command, fn, workers, args, address="127.0.0.1", restarts=restart > 0, **others)
