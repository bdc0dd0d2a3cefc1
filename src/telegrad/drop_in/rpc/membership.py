"""Groups that workers join and leave as they please: ``init_rpc`` without a world size.

The store holds the list of members, and a token: only who has it may change the list. Who joins reads the list, calls
every member, so that each learns of it, and adds itself. Members that are gone are taken off the list by who finds out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from telegrad.agent.agent import Agent
from telegrad.connection.worker_record import WorkerRecord, check_id, check_name
from telegrad.errors import DuplicateWorker, RendezvousError, RendezvousTimeout, WorkerLost
from telegrad.rendezvous import MAX_RECORD
from telegrad.rpc import Options, default_agent
from telegrad.rpc.api import join

_log = logging.getLogger("telegrad")

_KIND, _MEMBERS, _TOKEN = "kind", "members", "token"
_PAUSE = 0.02
_MOST = 1024  # members that the list may have


def check_kind(store: Any, kind: str) -> None:
    """Raise an error if others have begun a group of the other kind ("static" or "dynamic") at this store."""
    if store.compare_set(_KIND, "", kind).decode() != kind:
        raise RuntimeError("RPC group mixes statically and dynamically initialized members which is not supported.")


def join_open_group(
    store: Any,
    name: str,
    rank: int,
    options: Options,
    where: tuple[str, int] | None,
    prepare: Callable[[Agent], None],
) -> None:
    """Join as worker `name`, and return when every member knows of it."""

    def prepare_open(agent: Agent) -> None:
        agent.peers.allow_join = True
        prepare(agent)

    with take_turn(store, name, options.init_timeout):
        members = _read(store)
        for other in members:
            if name == other.name or rank == other.id:
                raise DuplicateWorker(f"worker {other.name!r} (rank {other.id}) is in the group already")
        join(name, rank, lambda me: [*members, me], options, where, prepare_open)
        agent = default_agent()
        alive = [member for member in members if _knows_us(agent, member)]
        _write(store, [*alive, agent.me])


def leave_open_group(store: Any, agent: Agent, timeout: float) -> None:
    """Take this worker off the list."""
    try:
        with take_turn(store, agent.me.name, timeout):
            _write(store, [member for member in _read(store) if member.name != agent.me.name])
    except RendezvousError:
        raise
    except RuntimeError as error:  # torch's stores raise nothing better when the process that holds them is gone
        _log.debug("worker %r leaves a group whose store is gone: %s", agent.me.name, error)


def _greet() -> None:
    """Whoever opens a connection makes itself known; there is no more to it."""


def _knows_us(agent: Agent, member: WorkerRecord) -> bool:
    try:
        agent.call(member.name, _greet)
    except WorkerLost as error:
        _log.warning("worker %r takes worker %r off the list: %s", agent.me.name, member.name, error)
        return False
    return True


@contextmanager
def take_turn(store: Any, name: str, timeout: float) -> Iterator[None]:
    """Hold the token while in this block."""
    deadline = time.monotonic() + timeout
    while (holder := store.compare_set(_TOKEN, "", name).decode()) != name:
        if time.monotonic() >= deadline:
            raise RendezvousTimeout(
                f"worker {name!r} waited {timeout:g} s to join or leave the group, while worker {holder!r} was at it. "
                "If it is gone, start the group again with another store"
            )
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        store.set(_TOKEN, "")


def _read(store: Any) -> list[WorkerRecord]:
    if not store.check([_MEMBERS]):
        return []
    data = store.get(_MEMBERS)
    try:
        if len(data) > MAX_RECORD * _MOST:
            raise ValueError("it is too long")
        members = msgspec.json.decode(data, type=list[WorkerRecord])
        for member in members:
            check_name(member.name)
            check_id(member.id)
    except (msgspec.DecodeError, ValueError) as error:
        raise RendezvousError(f"the list of members in the store cannot be read: {error}") from error
    return members


def _write(store: Any, members: list[WorkerRecord]) -> None:
    store.set(_MEMBERS, msgspec.json.encode(members).decode())
