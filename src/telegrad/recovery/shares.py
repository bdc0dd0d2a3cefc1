"""The part of a snapshot that one worker has: its *share*. A worker keeps its own shares, and those of another one.

The functions here run on the workers, called by the one that drives the training.
"""

from __future__ import annotations

import logging
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from telegrad.agent.agent import Agent
from telegrad.default_agent import default_agent
from telegrad.errors import DeadlineExceeded, RecoveryFailed
from telegrad.execution.reported_wait import ReportedWait
from telegrad.nn.module_handle import ModuleHandle
from telegrad.recovery import files, randomness, stateful
from telegrad.rpc.api import rpc_async, rpc_sync
from telegrad.rpc.fan_out import run_on_all
from telegrad.rref.handle import RRef
from telegrad.waiting import Event
from telegrad.waiting_report import seconds

_log = logging.getLogger("telegrad")

_KEEP_TIMEOUT = 120.0  # seconds until a worker that was started again has called `keep` for everything

Share = tuple[dict[str, Any], dict[str, Any], randomness.RandomState]
"""The state of the objects that the driver knows, of those that were kept by name, and of the random generators."""


class Run(NamedTuple):
    """Identifies a run of a training, which ends with the worker that drives it."""

    driver: str
    incarnation: int
    token: str


class SnapshotId(NamedTuple):
    """Identifies a snapshot of a training run."""

    run: Run
    number: int


class _Vault:
    """The shares on one worker."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # protects all below
        self.own: dict[SnapshotId, Share] = {}
        self.held: dict[tuple[SnapshotId, str], Share] = {}
        self.kept: dict[str, Any] = {}
        self.initial: dict[str, Any] = {}  # the states of those that some snapshot does not contain
        self.waiting: list[Event] = []


_vaults: weakref.WeakKeyDictionary[Agent, _Vault] = weakref.WeakKeyDictionary()
_vaults_lock = threading.Lock()  # protects _vaults


def _vault() -> _Vault:
    with _vaults_lock:
        return _vaults.setdefault(default_agent(), _Vault())


def keep(name: str, value: Any) -> None:
    """Include an object of this worker in all snapshots, under a name: one that the driver has no reference to.

    A worker that is started again must keep an object with the same name. It gets the saved state. Going back to a
    snapshot of before the object was kept gives it the state that it had when it was kept.
    """
    if isinstance(value, ModuleHandle):
        raise TypeError(f"a RemoteModule cannot be kept: keep the module itself, on worker {value.on!r}")
    initial = stateful.save(value)
    vault = _vault()
    with vault.lock:
        vault.kept[name], vault.initial[name] = value, initial
        waiting, vault.waiting = vault.waiting, []
    for event in waiting:
        event.set()


# -- called by the driver -----------------------------------------------------------------------------------------


def take(snapshot: SnapshotId, incarnation: int, references: dict[str, RRef[Any]], oldest: int) -> None:
    """Copy the state of this worker's objects, and drop the snapshots before the one with the number `oldest`.

    `incarnation` is that of the worker on which the steps so far have run: its replacement has not done them.
    """
    me = default_agent().me
    if me.incarnation != incarnation:
        raise RecoveryFailed(f"worker {me.name!r} was replaced while the training took a snapshot")
    take_values(snapshot, {key: reference.local_value() for key, reference in references.items()}, oldest)


def take_values(snapshot: SnapshotId, values: dict[str, Any], oldest: int) -> None:
    """Do the same on the driver itself, which has objects instead of references."""
    vault = _vault()
    with vault.lock:
        kept = dict(vault.kept)
    share: Share = (
        {key: _save_value(key, value) for key, value in values.items()},
        {name: _save_value(name, value) for name, value in kept.items()},
        randomness.save(),
    )
    drop(snapshot.run, oldest)
    with vault.lock:
        vault.own[snapshot] = share


def _save_value(key: str, value: Any) -> Any:
    try:
        return stateful.save(value)
    except TypeError as error:
        raise TypeError(f"{key} on worker {default_agent().me.name!r}: {error}") from error


def push(snapshot: SnapshotId, holders: list[str], folder: str | None) -> None:
    """Send this worker's share to those that hold it, and write it to a folder on disk."""
    me = default_agent().me.name
    with _vault().lock:
        share = _vault_share(_vault(), snapshot)
    run_on_all(
        "sending a snapshot",
        [(holder, partial(rpc_async, holder, hold, (snapshot, me, share), timeout=0)) for holder in holders],
    )
    if folder is not None:
        files.write(Path(folder), me, share)


def hold(snapshot: SnapshotId, worker: str, share: Share) -> None:
    """Keep the share of another worker."""
    vault = _vault()
    with vault.lock:
        vault.held[snapshot, worker] = share


def give(snapshot: SnapshotId, worker: str) -> Share | None:
    """Return the share of another worker, if it is held here."""
    vault = _vault()
    with vault.lock:
        return vault.held.get((snapshot, worker))


def fetch(snapshot: SnapshotId, holder: str | None, folder: str | None) -> bool:
    """Get this worker's share of a snapshot from its holder or from disk. Returns whether it was there."""
    me, vault = default_agent().me.name, _vault()
    share: Share | None = None
    if holder is not None:
        share = rpc_sync(holder, give, (snapshot, me), timeout=0)
    elif folder is not None:
        share = files.read(Path(folder), me)
    if share is None:
        return False
    with vault.lock:
        vault.own[snapshot] = share
    return True


def load(snapshot: SnapshotId, references: dict[str, RRef[Any]]) -> None:
    """Give this worker's objects the state that they had in a snapshot."""
    load_values(snapshot, {key: reference.local_value() for key, reference in references.items()})


def load_values(snapshot: SnapshotId, values: dict[str, Any]) -> None:
    """Do the same on the driver."""
    vault = _vault()
    with vault.lock:
        items, kept, random_state = _vault_share(vault, snapshot)
        initial = {name: state for name, state in vault.initial.items() if name not in kept}
    me = default_agent().me.name
    if items.keys() != values.keys():
        differing = sorted(items.keys() ^ values.keys())
        raise RecoveryFailed(
            f"the build function has built other objects on worker {me!r} than before the snapshot: "
            f"{', '.join(differing[:5])}. It must build the same every time, and a directory belongs to one training"
        )
    for key, value in values.items():
        _load_value(me, key, value, items[key])
    for name, value in _kept(vault, {*kept, *initial}).items():
        _load_value(me, name, value, kept[name] if name in kept else initial[name])
    randomness.load(random_state)


def _load_value(worker: str, key: str, value: Any, saved: Any) -> None:
    try:
        stateful.load(value, saved)
    except Exception as error:
        raise RecoveryFailed(
            f"the saved state of {key} on worker {worker!r} cannot be loaded: {error}. It must be built the same every "
            "time, and a directory belongs to one training"
        ) from error


def drop(run: Run, oldest: int) -> None:
    """Drop the snapshots of a run before one with the number `oldest`, and those of a driver that was replaced."""
    vault = _vault()

    def is_old(snapshot: SnapshotId) -> bool:
        if snapshot.run == run:
            return snapshot.number < oldest
        return snapshot.run.driver == run.driver and snapshot.run.incarnation != run.incarnation

    with vault.lock:
        for snapshot in [each for each in vault.own if is_old(each)]:
            del vault.own[snapshot]
        for key in [each for each in vault.held if is_old(each[0])]:
            del vault.held[key]
        if vault.own:
            contained = set.intersection(*(set(kept) for _, kept, _ in vault.own.values()))
            for name in contained & vault.initial.keys():
                del vault.initial[name]


def _vault_share(vault: _Vault, snapshot: SnapshotId) -> Share:
    share = vault.own.get(snapshot)
    if share is None:
        raise RecoveryFailed(f"worker {default_agent().me.name!r} has no share of snapshot {snapshot[1]}")
    return share


def _kept(vault: _Vault, names: set[str]) -> dict[str, Any]:
    """Return the objects that were kept under these names. Waits for those that will be."""
    agent = default_agent()
    deadline = agent.runtime.now() + _KEEP_TIMEOUT
    missing: list[str] = []

    def report(elapsed: float) -> None:
        _log.warning(
            "worker %r has waited %s until its program calls telegrad.recovery.keep() for %s",
            agent.me.name,
            seconds(elapsed),
            ", ".join(map(repr, missing)),
        )

    with ReportedWait(agent.runtime, agent.executor, report):
        while True:
            event = agent.runtime.event()
            with vault.lock:
                missing[:] = sorted(names - vault.kept.keys())
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
