"""Makes this process, a prompt, a notebook or a script, a member of a group with workers that are started for it.

The workers only serve: they wait in `shutdown` until this process leaves. Functions and classes that ``__main__`` or a
notebook's cell defines are sent whole in each call, with the globals that they use, because the workers do not run
this program. A worker that dies does not stop the others: the calls that need it raise `WorkerLost`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from telegrad import rpc
from telegrad.default_agent import process_agent
from telegrad.errors import TelegradError
from telegrad.launch.base import Group
from telegrad.launch.local import LocalGroup, start_group
from telegrad.launch.local_rendezvous import worker_names
from telegrad.launch.restarts import RestartPolicy
from telegrad.launch.work import dump_work
from telegrad.options import Options
from telegrad.transport.runtime_directory import runtime_directory

_NEVER = 1e6  # seconds, eleven days, after which a worker that only serves complains that nobody shuts down

_LEAVE = 2.0  # seconds that calls in progress get when the group is stopped


def workers(
    workers: int | Sequence[str] = 2,
    *,
    name: str = "main",
    prefix: bool = True,
    options: Options | None = None,
    devices_per_worker: int | None = None,
) -> WorkersHere:
    """Start workers on this machine, and make this process a member of their group, named `name`.

    `workers` is a number (the names are worker0, worker1 and so on) or a list of names. Use it in a ``with`` statement,
    or without one in a notebook, and call `join` or `stop` in the end. `options` are those of `init_rpc`, for all
    members; their token and `init_method` are not used. Output of the workers is printed with their names as prefixes,
    unless `prefix` is false.

    >>> with workers(2):
    ...     rpc.rpc_sync("worker1", lambda x: x + 1, (41,))
    42
    """
    existing = process_agent()
    if existing is not None:
        raise TelegradError(
            f"this process is already worker {existing.me.name!r} of a group: call telegrad.shutdown() first, or start "
            "the workers from another process"
        )
    names = worker_names([*worker_names(workers), name])[:-1]  # checks the name, too
    options = replace(options or Options(), token=None)
    group = start_group(
        names,
        dump_work(_serve, (), {"rpc_backend_options": replace(options, init_method="env://")}),
        prefix=prefix,
        devices_per_worker=devices_per_worker,
        policy=RestartPolicy(0),
        keep_going=True,
        others=[name],
        # All use the directory of this process, so that it and the workers find each other's unix sockets.
        environment={"TELEGRAD_RUNTIME_DIR": str(runtime_directory())},
    )
    try:
        _join(group, name, options)
    except BaseException:
        group.stop()
        raise
    return WorkersHere(group, name)


def _join(group: LocalGroup, name: str, options: Options) -> None:
    """Join the group as its last rank, whatever the environment says about this process."""
    rank = len(group.names)
    url = f"{group.rendezvous.init_method}?rank={rank}&world_size={rank + 1}"
    rpc.init_rpc(name, rpc_backend_options=replace(options, init_method=url, token=group.rendezvous.token))


def _serve() -> None:
    """What a worker does before it waits in `shutdown`: nothing. It does not complain that the prompt lives on."""
    rpc.default_agent().shutdown_protocol.report_after = _NEVER


class WorkersHere(Group):
    """The workers that serve this process, which is a member of their group."""

    def __init__(self, group: LocalGroup, name: str) -> None:
        self._group = group
        self.name = name
        """The name of this process in the group."""
        self._process = os.getpid()
        # Or the end of this process would kill workers that are about to end, and leave their sockets behind.
        atexit.register(self.stop)

    @property
    def names(self) -> Sequence[str]:
        """The names of the workers, in order, without this process."""
        return self._group.names

    @property
    def pids(self) -> dict[str, int]:
        """The processes of the workers, by name."""
        return {name: worker.pid for name, worker in self._group.processes.items()}

    def join(self, timeout: float | None = None) -> list[Any]:
        """Leave the group when no call is in progress, and wait until the workers have ended.

        Raises `WorkerFailed` if one of them died, and a `DeadlineExceeded` or a `GroupTimeout` after `timeout` seconds.
        """
        began = time.monotonic()
        try:
            rpc.shutdown(timeout=timeout or 0.0)
        except BaseException:
            self.stop()
            raise
        atexit.unregister(self.stop)
        return self._group.join(None if timeout is None else max(0.0, began + timeout - time.monotonic()))

    def kill(self, name: str) -> None:
        """Kill one worker with SIGKILL. The others continue."""
        self._group.kill(name)

    def stop(self) -> None:
        """Leave the group, and stop the workers. What they run gets a moment to end.

        Does nothing in a process that was forked from this one, and is no member.
        """
        atexit.unregister(self.stop)
        if os.getpid() != self._process:
            return
        agent = process_agent()
        with contextlib.suppress(TelegradError):  # a function goes on, or a worker is lost
            if agent is not None and agent.me.name == self.name:
                rpc.shutdown(timeout=_LEAVE)
            self._group.join(_LEAVE)
        self._group.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and os.getpid() == self._process:
            self.join()
        else:
            self.stop()

    def __repr__(self) -> str:
        return f"<this process, worker {self.name!r}, and its workers {', '.join(self.names)}>"
