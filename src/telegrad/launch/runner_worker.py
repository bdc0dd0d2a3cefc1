"""One worker that runs under a runner, as its launcher sees it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from telegrad.launch.runner_channel import Channel
from telegrad.launch.runner_messages import RESULT, Hello, Output
from telegrad.launch.worker import PipeConsumer, signal_name
from telegrad.launch.worker_result import WorkerResult


class RunnerWorker:
    """One worker, as the launcher sees it."""

    def __init__(
        self,
        name: str,
        rank: int,
        printers: Mapping[int, PipeConsumer],
        *,
        is_function: bool = True,
        route: str = "",
    ) -> None:
        """Make a worker that runs a function, or a command. `route` is how its runner is reached, as in "ssh to a"."""
        self.name, self.rank = name, rank
        self.result = WorkerResult()
        self.exitcode: int | None = None
        self.killed_on_purpose = False
        self.lost = False
        self.hello: Hello | None = None
        self.channel: Channel | None = None
        self._printers = printers
        self._is_function = is_function
        self._route = route

    def feed(self, output: Output) -> None:
        """Take what the worker has written."""
        if output.stream == RESULT:
            self.result.feed(output.data)
        else:
            self._printers[output.stream].feed(output.data)

    def connect(self, channel: Channel, hello: Hello) -> None:
        """Take over a runner, which may be that of a later start: what `kill` did to the one before is over."""
        self.killed_on_purpose = self.killed_on_purpose and self.hello is None
        self.channel, self.hello = channel, hello
        self.result, self.exitcode, self.lost = WorkerResult(), None, False

    def close(self) -> None:
        """Close the connection, and print what is left."""
        channel, self.channel = self.channel, None
        with ExitStack() as stack:  # All of it, even if nothing can be printed: the runner must see the end.
            if channel is not None:
                stack.callback(channel.close)
            for printer in self._printers.values():
                stack.callback(printer.close)

    def succeeded(self) -> bool:
        """Return whether the function returned, or the script exited with 0."""
        has_result = self.result.complete() and not self.result.is_error()
        return self.exitcode == 0 and (has_result or not self._is_function)

    @property
    def ended(self) -> bool:
        """Whether the worker does not run any more."""
        return self.exitcode is not None or self.lost

    def describe_exit(self) -> str:
        """Return how the worker failed."""
        if self.result.is_error():
            return f"raised {self.result.raised().summary}"
        code = self.exitcode or 0
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        if self.lost:
            how = self._describe_loss()
            if self.hello is None:
                return how
        return f"{how} before its function returned" if self._is_function else how

    def _describe_loss(self) -> str:
        route = self._route or "the connection to its runner"
        if self.hello is None:  # the runner has not come to the launcher: the launcher has gone to the runner
            return (
                f"was not started: {route} ended before Python ran there. Check that it works without a password, and "
                "that the same Python is there at the same path"
            )
        return f"was lost: {route} has ended"
