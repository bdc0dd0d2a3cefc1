"""Makes this process, which Ray has started, a member of a group: the process of an actor, or the driver.

Everything that a member needs comes inside a Ray call: the store, the token, name, rank and generation.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from telegrad.connection.worker_record import AWAIT_VARIABLE
from telegrad.default_agent import process_agent
from telegrad.environment.launchers import RESTART_VARIABLE
from telegrad.errors import TelegradError
from telegrad.launch.ray.metrics import report_metrics
from telegrad.launch.ray.store import Call, RayStore, close_store, find_store, keep_store, store_url
from telegrad.options import Options

if TYPE_CHECKING:
    from telegrad.rpc.group_rendezvous import Rendezvous


@dataclass(frozen=True)
class Membership:
    """The place of one worker in a group."""

    key: str
    """Names the group among those of this Ray cluster. Not a secret."""
    name: str
    rank: int
    world_size: int
    token: str = field(repr=False)
    coordinator: Any = field(repr=False)
    """The handle of the group's `Coordinator`."""
    address: tuple[str, int] | None = None
    """Host and port of Ray's head, which all nodes reach."""
    restart: int = 0
    """How often the driver has started this worker before: its generation."""
    awaited: float = 0.0
    """For how many seconds a shutdown waits for workers that are started again."""

    @property
    def init_method(self) -> str:
        """The init_method that finds the group's store in this process."""
        return store_url(self.key)

    def variables(self) -> dict[str, str]:
        """Return what the environment says about the generation of this worker while it joins."""
        return {RESTART_VARIABLE: str(self.restart), AWAIT_VARIABLE: f"{self.awaited:g}"}


_joined: Membership | None = None  # of this process, as the agent is


def coordinator_call(coordinator: Any) -> Call:
    """Return a function that calls methods of the coordinator. Errors of Ray become RuntimeErrors."""
    import ray

    def call(method: str, arguments: Sequence[Any], timeout: float) -> Any:
        try:
            return ray.get(getattr(coordinator, method).remote(*arguments), timeout=timeout)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RuntimeError(
                f"the group's store, an actor on the driver's node, does not answer: {reason}"
            ) from error

    return call


def open_store(membership: Membership) -> RayStore:
    """Open the store of the group in this process, unless it is open. It stays open until `close_store`."""
    store = find_store(membership.key)
    if store is None:
        store = RayStore(coordinator_call(membership.coordinator), membership.address)
        keep_store(membership.key, store)
    return store


def enter(membership: Membership, options: Options, replaces: int = -1) -> bool:
    """Join the group, unless this process has joined it already. Returns whether it has joined now.

    If the others have lost this worker, `replaces` is the generation that they lost. A process that has joined under
    this generation or an earlier one leaves first: to the others it is gone.
    """
    global _joined
    from telegrad.rpc.api import join

    agent = process_agent()
    if _joined is not None and _joined.key == membership.key:
        if agent is not None and not agent.closed and agent.me.generation > replaces:
            return False
        leave(membership.key, graceful=False)
    elif agent is not None:
        raise TelegradError(
            f"this process cannot join as worker {membership.name!r}: it is worker {agent.me.name!r} of another group; "
            "call telegrad.rpc.shutdown() there first"
        )
    options = with_token(options, membership.token)
    rendezvous = make_rendezvous(membership, options.init_timeout)
    try:
        with _environment(membership.variables()):
            join(membership.name, membership.rank, rendezvous, options, report_metrics)
    except BaseException:
        close_store(membership.key)
        raise
    _joined = membership
    return True


def with_token(options: Options, token: str) -> Options:
    """Return a copy of the options with the token of the group."""
    options = copy.copy(options)
    options.token = token
    return options


def make_rendezvous(membership: Membership, timeout: float) -> Rendezvous:
    """Return the rendezvous of a member."""
    from telegrad.rpc.group_rendezvous import Rendezvous

    store = open_store(membership)
    return Rendezvous(store, membership.rank, membership.world_size, timeout, address=membership.address)


def leave(key: str, *, graceful: bool) -> None:
    """Leave the group, if this process has joined it."""
    global _joined
    from telegrad import rpc

    if _joined is None or _joined.key != key:
        return
    try:
        rpc.shutdown(graceful=graceful)
    finally:
        _joined = None
        close_store(key)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block. `init_rpc` reads there what a launcher says about generations."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
