"""What telegrad uses of Ray in the driver: actors, placement groups, and the errors of both."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import ModuleType
from typing import Any

from telegrad.errors import TelegradError
from telegrad.launch.process_exit import ProcessId, this_machine, wait_for_exit
from telegrad.launch.ray.coordinator import Coordinator
from telegrad.launch.ray.membership import Membership
from telegrad.launch.ray.outcome import Outcome, Place
from telegrad.launch.ray.worker import Startup, WorkerActor

_log = logging.getLogger("telegrad")

_GONE_WITHIN = 30.0
_SPARE_CALLS = 1000  # calls of the coordinator that run at the same time, beside those that wait for the end


def import_ray() -> ModuleType:
    """Return Ray, connected to a cluster. Raises an error that says how to install it."""
    try:
        import ray
    except ImportError as error:
        raise TelegradError("telegrad.launch.ray needs Ray: install it with `pip install telegrad[ray]`") from error
    if not ray.is_initialized():
        ray.init()
    module: ModuleType = ray
    return module


_QUIET = 10.0  # seconds that Ray has to place the workers before the user is told
_DETAILS = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:")


class Rendezvous:
    """The coordinator and the token of one group, and its members' places."""

    def __init__(self, names: Sequence[str], awaited: float = 0.0) -> None:
        ray = import_ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        context = ray.get_runtime_context()
        host, _, port = context.gcs_address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._names = list(names)
        self._token = secrets.token_hex(32)
        self._awaited = awaited
        self._key = secrets.token_hex(8)
        self.coordinator = (
            ray.remote(Coordinator)
            .options(
                num_cpus=0,
                max_concurrency=len(self._names) + _SPARE_CALLS,
                # With the driver: then it cannot be lost before the driver is.
                scheduling_strategy=NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False),
            )
            .remote()
        )

    @property
    def key(self) -> str:
        """Names the group."""
        return self._key

    def membership(self, rank: int, restart: int = 0) -> Membership:
        """Return the place of a worker in the group."""
        return Membership(
            key=self._key,
            name=self._names[rank],
            rank=rank,
            world_size=len(self._names),
            token=self._token,
            coordinator=self.coordinator,
            address=self._address,
            restart=restart,
            awaited=self._awaited,
        )

    def close(self) -> None:
        """End the coordinator."""
        kill(self.coordinator)


class StartedActor:
    """One start of a worker."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def kill(self) -> None:
        """Kill the actor, if it has not ended."""
        kill(self._actor)

    def finish(self, place: Place | None, died: bool, gone: Callable[[], None]) -> None:
        """Kill the actor, and call `gone` when its process has ended, at the latest after `_GONE_WITHIN` seconds.

        Ray's own answers come earlier. On another machine, a task of Ray waits for the process, unless Ray says that it
        has `died`: then its node may be dead, too.
        """
        kill(self._actor)
        if place is not None and place.process.machine == this_machine():
            wait = partial(_wait_here, place.process, gone)
            threading.Thread(target=wait, name="telegrad-ray-exit", daemon=True).start()
        elif place is None or died:
            gone()
        else:
            _wait_there(place).add_done_callback(lambda future: gone())


class RayStarter:
    """Starts workers as actors in a placement group, which is removed by `close`."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        work: bytes,
        init: bool,
        workers: int,
        resources: Mapping[str, float],
        placement: str,
        runtime_env: Mapping[str, Any] | None,
        timeout: float,
    ) -> None:
        from ray.util.placement_group import placement_group

        self._rendezvous = rendezvous
        self._work = work
        self._init = init
        self._runtime_env = None if runtime_env is None else dict(runtime_env)
        rest = dict(resources)
        self._options: dict[str, Any] = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0)}
        if "memory" in rest:
            self._options["memory"] = rest.pop("memory")
        self._options["resources"] = rest
        bundle = {name: amount for name, amount in resources.items() if amount}
        self._placed = placement_group([bundle] * workers, strategy=placement) if bundle else None
        if self._placed is None:
            return
        wanted = f"{workers} workers with {_amounts(bundle, bundle)} each ({placement})"
        if not self._placed.wait(min(_QUIET, timeout)):
            if timeout > _QUIET:
                _log.warning("telegrad waits for Ray to place %s; %s", wanted, _room(bundle))
            if timeout <= _QUIET or not self._placed.wait(timeout - _QUIET):
                self.close()
                raise TelegradError(
                    f"Ray could not place {wanted} within {timeout:g} s: {_room(bundle)}. Ask for less, add nodes, "
                    "or raise the timeout"
                )

    def start(
        self, rank: int, restart: int, started: Callable[[Place], None], ended: Callable[[Outcome], None]
    ) -> StartedActor:
        """Start a worker. `started` and `ended` are called by Ray's threads."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = {**self._options, "max_restarts": 0, "runtime_env": self._runtime_env}
        if self._placed is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._placed, rank, placement_group_capture_child_tasks=False
            )
        membership = self._rendezvous.membership(rank, restart)
        actor = ray.remote(WorkerActor).options(**options).remote(membership.name)
        actor.place.remote().future().add_done_callback(partial(_report_place, started))
        run = actor.run.remote(Startup(membership, self._work, self._init))
        run.future().add_done_callback(lambda future: ended(_outcome(future)))
        return StartedActor(actor)

    def request_stop(self) -> None:
        """Send SIGTERM to all workers."""
        self._rendezvous.coordinator.stop.remote()

    def close(self) -> None:
        """Remove the placement group."""
        from ray.util.placement_group import remove_placement_group

        if self._placed is not None:
            remove_placement_group(self._placed)


def _wait_here(process: ProcessId, gone: Callable[[], None]) -> None:
    if not wait_for_exit(process, _GONE_WITHIN):
        _log.warning("process %d of a Ray actor was killed, and still runs after %g s", process.pid, _GONE_WITHIN)
    gone()


def _wait_there(place: Place) -> Future[Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    affinity = NodeAffinitySchedulingStrategy(place.node, soft=False)
    task = ray.remote(wait_for_exit).options(num_cpus=0, max_retries=0, scheduling_strategy=affinity)
    future: Future[Any] = task.remote(place.process, _GONE_WITHIN).future()
    return future


def kill(actor: Any) -> None:
    """Kill an actor, if it has not ended and Ray runs."""
    import ray

    if ray.is_initialized():
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # a node or a cluster that is gone
            ray.kill(actor, no_restart=True)


def _report_place(started: Callable[[Place], None], future: Future[Any]) -> None:
    if future.exception() is None:  # else the worker has ended, which `ended` reports
        started(future.result())


def _outcome(future: Future[Any]) -> Outcome:
    error = future.exception()
    if error is not None:
        return Outcome(death=first_sentence(error), node_lost=_is_node_lost(error))
    outcome: Outcome = future.result()
    return outcome


def _is_node_lost(error: BaseException) -> bool:
    """Return whether an actor has ended because of its node. Ray says so only in words."""
    import ray

    return isinstance(error, ray.exceptions.ActorUnavailableError) or "node has died" in str(error)


def first_sentence(error: BaseException) -> str:
    """Return the part of an error of Ray that says what happened, on one line.

    >>> first_sentence(RuntimeError("It died.\\n\\tpid: 12\\nEnd of file. Some common causes include: (1) many"))
    'It died. End of file.'
    """
    lines = [line.strip() for line in str(error).partition("Some common causes")[0].splitlines()]
    kept = [line for line in lines if line and not line.startswith(_DETAILS)]
    return " ".join(kept).strip()[:500] or type(error).__name__


def _amounts(found: Mapping[str, float], of: Mapping[str, float]) -> str:
    return ", ".join(f"{found.get(name, 0):g} {name}" for name in of)


def _room(bundle: Mapping[str, float]) -> str:
    """Return how much the cluster has of what a bundle asks for."""
    import ray

    return (
        f"the cluster has {_amounts(ray.cluster_resources(), bundle)} in all and "
        f"{_amounts(ray.available_resources(), bundle)} free"
    )
