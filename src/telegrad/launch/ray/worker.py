"""The actor that runs one worker of a group, in a process of its own that Ray has started."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field

import cloudpickle

from telegrad.connection.token_source import TOKEN_VARIABLES
from telegrad.launch.process_exit import this_process
from telegrad.launch.ray.membership import Membership, open_store
from telegrad.launch.ray.metrics import report_metrics
from telegrad.launch.ray.outcome import Outcome, Place
from telegrad.launch.work import run_work, without_frames_of
from telegrad.launch.worker_result import capture

_NOT_INHERITED = (*TOKEN_VARIABLES, "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables of whoever started the Ray node, which are not about this group."""


@dataclass(frozen=True)
class Startup:
    """Everything that a worker needs to start."""

    membership: Membership
    work: bytes = field(repr=False)
    """The pickled function, its arguments and the options of init_rpc; see `telegrad.launch.work.dump_work`."""
    init: bool


class WorkerActor:
    """One start of a worker. Ray prints the lines of its output with its repr, which is the worker's name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def place(self) -> Place:
        """Return where this worker runs."""
        import ray

        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), this_process())

    def run(self, startup: Startup) -> Outcome:
        """Call the function as a member of the group, and return how it ended."""
        try:
            prepare(startup.membership)
            stopped = startup.membership.coordinator.stopped.remote()
            # Also called if the coordinator is gone: then so is the driver.
            stopped.future().add_done_callback(lambda future: os.kill(os.getpid(), signal.SIGTERM))
            name, work = startup.membership.name, startup.work
            return Outcome(cloudpickle.dumps(run_work(work, name, init=startup.init, joined=_report_metrics)))
        except BaseException as error:  # noqa: BLE001 - sent to the driver
            return Outcome(exception=capture(without_frames_of(error, [__file__])))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def prepare(membership: Membership) -> None:
    """Set up this process so that ``init_rpc()`` without arguments joins the group."""
    from telegrad.rpc.token import hold_token

    for name in _NOT_INHERITED:
        os.environ.pop(name, None)
    open_store(membership)
    hold_token(membership.token)
    os.environ.update(
        {
            "RANK": str(membership.rank),
            "WORLD_SIZE": str(membership.world_size),
            "TELEGRAD_NAME": membership.name,
            "TELEGRAD_INIT_METHOD": membership.init_method,
            # The store is not one that rank 0 hosts.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **membership.variables(),
        }
    )


def _report_metrics() -> None:
    from telegrad.default_agent import default_agent

    report_metrics(default_agent())
