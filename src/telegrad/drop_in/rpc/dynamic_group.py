"""Dynamic groups, which workers may join and leave at any time: ``init_rpc`` without a world size.

The store holds the list of members and a token, and only the worker that holds the token may change the list. A worker
that joins reads the list, calls every member so that each learns about it, and adds itself. Whoever finds a member gone
removes it from the list.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from telegrad.agent.agent import Agent
from telegrad.bootstrap import ListenIfNeeded
from telegrad.connection.worker_record import WorkerRecord, check_id, check_name
from telegrad.errors import DuplicateWorker, RendezvousError, RendezvousTimeout, WorkerLost
from telegrad.rendezvous import MAX_RECORD
from telegrad.rpc import Options, default_agent
from telegrad.rpc.api import join

_log = logging.getLogger("telegrad")

_KIND, _MEMBERS, _TOKEN = "kind", "members", "token"
_POLL_INTERVAL = 0.02
_MAX_MEMBERS = 1024


def check_kind(store: Any, kind: str) -> None:
    """Raise an error if other workers started a group of the other kind ("static" or "dynamic") with this store."""
    if store.compare_set(_KIND, "", kind).decode() != kind:
        raise RuntimeError("RPC group mixes statically and dynamically initialized members which is not supported.")


def join_dynamic_group(
    store: Any,
    name: str,
    rank: int,
    options: Options,
    store_address: tuple[str, int] | None,
    prepare: Callable[[Agent], None],
) -> None:
    """Join as worker `name`, and return when every member knows this worker."""

    def prepare_open(agent: Agent) -> None:
        agent.peers.allow_join = True
        prepare(agent)

    with membership_lock(store, name, options.init_timeout):
        members = _read(store)
        for other in members:
            if name == other.name or rank == other.id:
                raise DuplicateWorker(f"worker {other.name!r} (rank {other.id}) is already in the group")
        join(name, rank, partial(_join_members, members), options, store_address, prepare_open)
        agent = default_agent()
        alive = [member for member in members if _announce(agent, member)]
        _write(store, [*alive, agent.me])


def _join_members(
    members: list[WorkerRecord], me: WorkerRecord, listen_if_needed: ListenIfNeeded
) -> list[WorkerRecord]:
    listen_if_needed(())  # whoever joins later may be on another host
    return [*members, me]


def leave_dynamic_group(store: Any, agent: Agent, timeout: float) -> None:
    """Remove this worker from the list of members."""
    try:
        with membership_lock(store, agent.me.name, timeout):
            _write(store, [member for member in _read(store) if member.name != agent.me.name])
    except RendezvousError:
        raise
    except RuntimeError as error:  # torch's stores raise nothing more specific when the process that hosts them is gone
        _log.debug("worker %r leaves a group whose store is gone: %s", agent.me.name, error)


def _greet() -> None:
    """Do nothing: the connection that the call opens introduces its caller."""


def _announce(agent: Agent, member: WorkerRecord) -> bool:
    """Introduce this worker to a member, and return whether the member is alive."""
    try:
        agent.call(member.name, _greet)
    except WorkerLost as error:
        _log.warning("worker %r removes worker %r from the member list: %s", agent.me.name, member.name, error)
        return False
    return True


@contextmanager
def membership_lock(store: Any, name: str, timeout: float) -> Iterator[None]:
    """Hold the token of the group inside the block."""
    deadline = time.monotonic() + timeout
    while (holder := store.compare_set(_TOKEN, "", name).decode()) != name:
        if time.monotonic() >= deadline:
            raise RendezvousTimeout(
                f"worker {name!r} waited {timeout:g} s to join or leave the group while worker {holder!r} held its "
                "membership token. If that worker is gone, restart the group with another store"
            )
        time.sleep(_POLL_INTERVAL)
    try:
        yield
    finally:
        store.set(_TOKEN, "")


def _read(store: Any) -> list[WorkerRecord]:
    if not store.check([_MEMBERS]):
        return []
    data = store.get(_MEMBERS)
    try:
        if len(data) > MAX_RECORD * _MAX_MEMBERS:
            raise ValueError("it is too long")
        members = msgspec.json.decode(data, type=list[WorkerRecord])
        for member in members:
            check_name(member.name)
            check_id(member.id)
    except (msgspec.DecodeError, ValueError) as error:
        raise RendezvousError(f"cannot read the member list in the store: {error}") from error
    return members


def _write(store: Any, members: list[WorkerRecord]) -> None:
    store.set(_MEMBERS, msgspec.json.encode(members).decode())
