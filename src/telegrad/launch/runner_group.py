"""A group whose workers run under runners (`telegrad.launch.runner`), which an engine has started somewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from telegrad.launch.output import PrefixedLines, UnchangedOutput, prefixes
from telegrad.launch.runner_engine import Engine, Work
from telegrad.launch.runner_messages import STDERR, STDOUT
from telegrad.launch.runner_supervisor import RunnerSupervisor
from telegrad.launch.runner_worker import RunnerWorker
from telegrad.launch.supervised_group import SupervisedGroup
from telegrad.launch.supervisor import Failure
from telegrad.launch.worker import PipeConsumer

START_TIMEOUT = 600.0
"""Seconds until all runners must be connected: jobs wait in queues, and imports from network file systems take long."""


class RunnerGroup(SupervisedGroup[RunnerWorker]):
    """The workers of one group, on the machines of an engine."""

    def __init__(self, work: Work, engine: Engine, *, start_timeout: float = START_TIMEOUT) -> None:
        """Take over an engine that starts, and give its runners their work."""
        outputs: dict[int, list[PipeConsumer]] = {
            stream: [
                PrefixedLines(text, target) if work.prefix else UnchangedOutput(target)
                for text in prefixes(work.names, target)
            ]
            for stream, target in ((STDOUT, sys.stdout), (STDERR, sys.stderr))
        }
        workers = {
            name: RunnerWorker(
                name,
                rank,
                {stream: lines[rank] for stream, lines in outputs.items()},
                is_function=bool(work.work),
                route=engine.routes[rank] if engine.routes else "",
            )
            for rank, name in enumerate(work.names)
        }
        super().__init__(workers)
        self.supervisor = RunnerSupervisor(work, engine, workers, start_timeout)
        self.begin()

    def kill(self, name: str) -> None:
        """Kill one worker; see `Group.kill`."""
        self._check_is_member(name)
        self.supervisor.request_kill(name)

    def _run(self) -> None:
        self.supervisor.run()

    def _request_stop(self) -> None:
        self.supervisor.requests.stop()

    def _failures(self) -> Sequence[Failure[RunnerWorker | None]]:
        return self.supervisor.failures
