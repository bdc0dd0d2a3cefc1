"""Dynamic groups, which workers may join and leave at any time: ``init_rpc`` without a world size.

The store holds the list of members and a lock, and only the worker that holds the lock may change the list. A worker
that joins reads the list, calls every member so that each learns about it, and adds itself. Whoever finds a member gone
removes it from the list.

The list is authenticated with the group's token, if it has one (`telegrad.rendezvous_records`). A hostile store can
repeat an old list: then a newcomer does not learn about some members, or finds them gone. It can also show a newcomer
the list of another group with the same token, which the newcomer then joins: nothing tells two such groups apart. The
kind of the group and the lock are not authenticated: whoever changes them can only prevent workers from joining.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.bootstrap import ListenIfNeeded, Probe, check_token
from telegrad.connection.group_keys import GroupKeys, derive_keys
from telegrad.connection.worker_record import MAX_NAME, FoundGroup, WorkerRecord
from telegrad.drop_in.rpc.device_maps import Config, check_device_maps, device_config
from telegrad.errors import DuplicateWorker, RendezvousError, RendezvousTimeout, WorkerLost
from telegrad.rendezvous_records import MAX_RECORD, Records, check_record
from telegrad.rpc import Options, default_agent
from telegrad.rpc.api import join

_log = logging.getLogger("telegrad")

_KIND, _MEMBERS, _LOCK = "kind", "members", "lock"
_POLL_INTERVAL = 0.02
_MAX_LIST = 1024 * MAX_RECORD  # bytes of a member list


def check_kind(store: Any, kind: str) -> None:
    """Raise an error if other workers started a group of the other kind ("static" or "dynamic") with this store."""
    if store.compare_set(_KIND, "", kind) != kind.encode():
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
        prepare(agent)

    token, _ = check_token(options)
    records = Records(None if token is None else derive_keys(token), store)
    with membership_lock(store, name, options.init_timeout):
        members = _read(store, records)
        for other in members:
            if name == other.name or rank == other.id:
                raise DuplicateWorker(f"worker {other.name!r} (rank {other.id}) is already in the group")
        join(name, rank, partial(_join_members, members), options, store_address, prepare_open)
        agent = default_agent()
        configs = {member.name: config for member in members if (config := _announce(agent, member)) is not None}
        check_device_maps({**configs, name: device_config()}, static=False)
        _write(store, records, [*(member for member in members if member.name in configs), agent.me])


def _join_members(
    members: list[WorkerRecord],
    me: WorkerRecord,
    keys: GroupKeys | None,
    listen_if_needed: ListenIfNeeded,
    probe: Probe,
) -> FoundGroup:
    listen_if_needed(())  # whoever joins later may be on another host
    return FoundGroup([*members, me], is_open=True)


def leave_dynamic_group(store: Any, agent: Agent, timeout: float) -> None:
    """Remove this worker from the list of members."""
    records = Records(agent.local.keys, store)
    try:
        with membership_lock(store, agent.me.name, timeout):
            remaining = [member for member in _read(store, records) if member.name != agent.me.name]
            _write(store, records, remaining)
    except RendezvousError:
        raise
    except RuntimeError as error:  # torch's stores raise nothing more specific when the process that hosts them is gone
        _log.debug("worker %r leaves a group whose store is gone: %s", agent.me.name, error)


def _announce(agent: Agent, member: WorkerRecord) -> Config | None:
    """Introduce this worker to a member, and return the member's device maps, or None if it is gone.

    The connection that the call opens introduces its caller.
    """
    try:
        config: Config = agent.call(member.name, device_config)
    except WorkerLost as error:
        _log.warning("worker %r removes worker %r from the member list: %s", agent.me.name, member.name, error)
        return None
    return config


@contextmanager
def membership_lock(store: Any, name: str, timeout: float) -> Iterator[None]:
    """Hold the lock of the member list inside the block."""
    deadline = time.monotonic() + timeout
    while (holder := store.compare_set(_LOCK, "", name)) != name.encode():
        if time.monotonic() >= deadline:
            raise RendezvousTimeout(
                f"worker {name!r} waited {timeout:g} s to join or leave the group while worker "
                f"{holder[:MAX_NAME].decode(errors='replace')!r} held its membership lock. If that worker is gone, "
                "restart the group with another store"
            )
        time.sleep(_POLL_INTERVAL)
    try:
        yield
    finally:
        store.set(_LOCK, "")


def _read(store: Any, records: Records) -> list[WorkerRecord]:
    if not store.check([_MEMBERS]):
        return []
    members = records.decode(_MEMBERS, store.get(_MEMBERS), list[WorkerRecord], "the member list", _MAX_LIST)
    for member in members:
        check_record(member, member.id)
    return members


def _write(store: Any, records: Records, members: list[WorkerRecord]) -> None:
    store.set(_MEMBERS, records.encode(_MEMBERS, members, _MAX_LIST))
