"""The part of a snapshot that one worker has: its *share*. A worker keeps its own shares, and those of another one.

The functions here run on the workers, called by the one that drives the training.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from telegrad.agent.agent import Agent
from telegrad.default_agent import default_agent
from telegrad.errors import DeadlineExceeded, RecoveryFailed
from telegrad.recovery import files, randomness, stateful
from telegrad.rpc.api import rpc_sync
from telegrad.rref.handle import RRef
from telegrad.waiting import Event

_KEEP_TIMEOUT = 120.0  # seconds until a worker that was started again has called `keep` for everything

Share = tuple[dict[str, Any], dict[str, Any], randomness.RandomState]
"""The state of the objects that the driver knows, of those that were kept by name, and of the random generators."""


class SnapshotId(NamedTuple):
    """Identifies a snapshot of a training run."""

    run: str
    number: int


class _Vault:
    """The shares on one worker."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # protects all below
        self.own: dict[SnapshotId, Share] = {}
        self.held: dict[tuple[SnapshotId, str], Share] = {}
        self.kept: dict[str, Any] = {}
        self.waiting: list[Event] = []


_vaults: weakref.WeakKeyDictionary[Agent, _Vault] = weakref.WeakKeyDictionary()
_vaults_lock = threading.Lock()  # protects _vaults


def _vault() -> _Vault:
    with _vaults_lock:
        return _vaults.setdefault(default_agent(), _Vault())


def keep(name: str, value: Any) -> None:
    """Include an object of this worker in all snapshots, under a name: one that the driver has no reference to.

    A worker that is started again must keep an object with the same name. It gets the saved state.
    """
    vault = _vault()
    with vault.lock:
        vault.kept[name] = value
        waiting, vault.waiting = vault.waiting, []
    for event in waiting:
        event.set()


# -- called by the driver -----------------------------------------------------------------------------------------


def take(snapshot: SnapshotId, references: dict[str, RRef[Any]], oldest: int) -> None:
    """Copy the state of this worker's objects, and drop the snapshots before the one with the number `oldest`."""
    take_values(snapshot, {key: reference.local_value() for key, reference in references.items()}, oldest)


def take_values(snapshot: SnapshotId, values: dict[str, Any], oldest: int) -> None:
    """Do the same on the driver itself, which has objects instead of references."""
    vault = _vault()
    with vault.lock:
        kept = dict(vault.kept)
    share: Share = (
        {key: stateful.save(value) for key, value in values.items()},
        {name: stateful.save(value) for name, value in kept.items()},
        randomness.save(),
    )
    drop(snapshot.run, oldest)
    with vault.lock:
        vault.own[snapshot] = share


def push(snapshot: SnapshotId, holder: str | None, directory: str | None) -> None:
    """Send this worker's share to the one that holds it, and write it to disk."""
    me = default_agent().me.name
    with _vault().lock:
        share = _vault_share(_vault(), snapshot)
    if holder is not None:
        rpc_sync(holder, hold, (snapshot, me, share), timeout=0)
    if directory is not None:
        files.write(Path(directory), snapshot.number, me, share)


def hold(snapshot: SnapshotId, worker: str, share: Share) -> None:
    """Keep the share of another worker."""
    vault = _vault()
    with vault.lock:
        vault.held[SnapshotId(*snapshot), worker] = share


def give(snapshot: SnapshotId, worker: str) -> Share | None:
    """Return the share of another worker, if it is held here."""
    vault = _vault()
    with vault.lock:
        return vault.held.get((SnapshotId(*snapshot), worker))


def fetch(snapshot: SnapshotId, holder: str | None, directory: str | None) -> bool:
    """Get this worker's share of a snapshot from its holder or from disk. Returns whether it was there."""
    me, vault = default_agent().me.name, _vault()
    share: Share | None = None
    if holder is not None:
        share = rpc_sync(holder, give, (snapshot, me), timeout=0)
    elif directory is not None:
        share = files.read(Path(directory), snapshot.number, me)
    if share is None:
        return False
    with vault.lock:
        vault.own[SnapshotId(*snapshot)] = share
    return True


def load(snapshot: SnapshotId, references: dict[str, RRef[Any]]) -> None:
    """Give this worker's objects the state that they had in a snapshot."""
    load_values(snapshot, {key: reference.local_value() for key, reference in references.items()})


def load_values(snapshot: SnapshotId, values: dict[str, Any]) -> None:
    """Do the same on the driver."""
    vault = _vault()
    with vault.lock:
        items, kept, random_state = _vault_share(vault, SnapshotId(*snapshot))
    if items.keys() != values.keys():
        differing = sorted(items.keys() ^ values.keys())
        raise RecoveryFailed(
            f"the build function has built other objects on worker {default_agent().me.name!r} than at first: "
            f"{', '.join(differing[:5])}. It must build the same every time"
        )
    for key, value in values.items():
        stateful.load(value, items[key])
    for name, value in _kept(vault, set(kept)).items():
        stateful.load(value, kept[name])
    randomness.load(random_state)


def drop(run: str, oldest: int) -> None:
    """Drop the snapshots of a run before one with the number `oldest`."""
    vault = _vault()
    with vault.lock:
        for snapshot in [each for each in vault.own if each.run == run and each.number < oldest]:
            del vault.own[snapshot]
        for key in [each for each in vault.held if each[0].run == run and each[0].number < oldest]:
            del vault.held[key]


def _vault_share(vault: _Vault, snapshot: SnapshotId) -> Share:
    share = vault.own.get(SnapshotId(*snapshot))
    if share is None:
        raise RecoveryFailed(f"worker {default_agent().me.name!r} has no share of snapshot {snapshot[1]}")
    return share


def _kept(vault: _Vault, names: set[str]) -> dict[str, Any]:
    """Return the objects that were kept under these names. Waits for those that will be."""
    agent = default_agent()
    deadline = agent.runtime.now() + _KEEP_TIMEOUT
    while True:
        event = agent.runtime.event()
        with vault.lock:
            missing = sorted(names - vault.kept.keys())
            if not missing:
                return {name: vault.kept[name] for name in names}
            vault.waiting.append(event)
        if not agent.executor.wait(event, deadline):
            raise DeadlineExceeded(
                f"worker {agent.me.name!r} was started again and did not call telegrad.recovery.keep() for "
                f"{', '.join(map(repr, missing))} within {_KEEP_TIMEOUT:g} s, as the one before it had",
                worker=agent.me.name,
                elapsed=_KEEP_TIMEOUT,
            )
