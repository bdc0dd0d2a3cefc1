"""The snapshots of a training run, as the driver sees them: takes them on all workers, and loads the last complete one.

A snapshot is complete when all workers have copied the state of their objects, and the holders of each copy have it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from telegrad.errors import RecoveryFailed, TelegradError, WorkersFailed
from telegrad.futures import Future
from telegrad.recovery import files, shares
from telegrad.recovery.agreement import Incarnations
from telegrad.recovery.shares import Run, SnapshotId
from telegrad.recovery.stateful import Found
from telegrad.rpc.api import rpc_async
from telegrad.rpc.fan_out import run_on_all
from telegrad.waiting_report import workers as named

_log = logging.getLogger("telegrad")


class _Snapshot(NamedTuple):
    id: SnapshotId
    step: int
    holders: dict[str, list[str]]
    incarnations: Incarnations
    is_built: bool
    """Whether it was taken after the state was built; if not, it has only what each worker had before."""


class Snapshots:
    """Takes and loads snapshots. `driver` is the worker that this runs on."""

    def __init__(self, driver: str, incarnation: int, copies: int, directory: Path | None) -> None:
        self._driver = driver
        self._copies = copies
        self._directory = directory
        self._run = Run(driver, incarnation, secrets.token_hex(8))
        self._number = 0
        self._latest: files.Latest | None = None  # the last one on disk that this run has completed or read
        self._complete: _Snapshot | None = None
        self._pushing: tuple[_Snapshot, list[Future[None]]] | None = None

    def go_to_beginning(self, workers: Incarnations) -> None:
        """Before the state is built, remember the random generators and kept objects of all workers.

        If a worker is lost before the first snapshot, set them to what they were, so that the same is built again.
        """
        self._finish_or_drop()
        if self._complete is not None and not self._complete.is_built:
            self._load_complete(self._complete, Found({}, {}), workers)
        elif self._complete is None and (self._directory is None or files.latest(self._directory) is None):
            self._begin(Found({}, {}), workers, 0, is_built=False)
            self.finish()

    def begin(self, found: Found, workers: Incarnations, step: int) -> None:
        """Copy the state of all objects, and begin to send the copies to their holders."""
        self._begin(found, workers, step, is_built=True)

    def _begin(self, found: Found, workers: Incarnations, step: int, *, is_built: bool) -> None:
        self.finish()
        for optimizer in found.optimizers():
            optimizer.send_hyperparameters()
        self._number += 1
        names = list(workers)
        ring = names * 2
        copies = min(self._copies, len(names) - 1)
        holders = {name: ring[place + 1 : place + 1 + copies] for place, name in enumerate(names)}
        snapshot = _Snapshot(SnapshotId(self._run, self._number), step, holders, dict(workers), is_built)
        oldest = self._complete.id.number if self._complete is not None else 0
        shares.take_values(snapshot.id, found.local, oldest)
        others = [name for name in names if name != self._driver]
        _on_all(
            "taking a snapshot",
            {name: (shares.take, (snapshot.id, workers[name], found.remote.get(name, {}), oldest)) for name in others},
        )
        folder = self._folder(snapshot)
        pushes = [rpc_async(name, shares.push, (snapshot.id, holders[name], folder), timeout=0) for name in names]
        self._pushing = snapshot, pushes

    def finish_if_ready(self) -> None:
        """Complete the snapshot that is being sent, if all of it has arrived."""
        if self._pushing is not None and all(push.done() for push in self._pushing[1]):
            self.finish()

    def _finish_or_drop(self) -> None:
        """Complete the snapshot that is being sent, if all of it has arrived. If not, somebody lost may have it."""
        if self._pushing is not None and not all(push.done() and _succeeded(push) for push in self._pushing[1]):
            self._pushing = None
        self.finish()

    def finish(self) -> None:
        """Wait until the snapshot that is being sent is complete."""
        if self._pushing is None:
            return
        snapshot, pushes = self._pushing
        for push in pushes:
            push.wait()
        self._pushing = None
        self._complete = snapshot
        if self._directory is not None and snapshot.is_built:
            latest = files.Latest(snapshot.id.number, snapshot.step, self._run.token)
            files.commit(self._directory, latest, snapshot.incarnations, self._latest)
            self._latest = latest

    def load(self, found: Found, workers: Incarnations) -> int:
        """Give all objects the state that they had in the last complete snapshot, and return its step; 0: none."""
        self._finish_or_drop()
        if self._complete is not None and self._complete.is_built:
            return self._load_complete(self._complete, found, workers)
        if self._directory is not None:
            return self._load_from_disk(self._directory, found, workers)
        return 0

    def _load_complete(self, snapshot: _Snapshot, found: Found, workers: Incarnations) -> int:
        """Load a snapshot: workers that were replaced since then get their shares from elsewhere."""
        fetches = {}
        for name, incarnation in workers.items():
            if snapshot.incarnations.get(name, incarnation) == incarnation:
                continue  # it has its share, or has joined the group since then and has none
            holders = snapshot.holders[name]
            there = [each for each in holders if workers.get(each) == snapshot.incarnations[each]]
            if not there and not snapshot.is_built:
                continue  # nobody knows what the one before it had, and nothing depends on that yet
            if not there and self._directory is None:
                raise RecoveryFailed(
                    f"worker {name!r} was lost together with {' and '.join(map(repr, holders)) or 'nobody else'}, "
                    "which held its snapshot: pass more copies or a directory to Training, and start it again"
                )
            fetches[name] = shares.fetch, (snapshot.id, there[0] if there else None, self._folder(snapshot))
        having = [
            name
            for name, incarnation in workers.items()
            if name in fetches or snapshot.incarnations.get(name) == incarnation
        ]
        self._load_all(snapshot.id, found, having, fetches)
        return snapshot.step

    def _load_from_disk(self, directory: Path, found: Found, workers: Incarnations) -> int:
        latest = files.latest(directory)
        if self._latest is not None and latest != self._latest:
            raise RecoveryFailed(
                f"snapshot {self._latest.number} of this training is not the last one in {directory} any more: pass "
                "each training a directory of its own, and remove nothing there"
            )
        if latest is None:
            files.create(directory)
            return 0
        self._latest = latest
        self._number = max(self._number, latest.number)  # what is still being sent never mixes with what follows
        snapshot = SnapshotId(self._run, latest.number)
        folder = str(latest.folder(directory))
        fetches = dict.fromkeys(workers, (shares.fetch, (snapshot, None, folder)))
        self._load_all(snapshot, found, list(workers), fetches)
        _log.warning("the training goes on with step %d, from the snapshot in %s", latest.step, directory)
        return latest.step

    def _load_all(
        self, snapshot: SnapshotId, found: Found, workers: list[str], fetches: dict[str, tuple[Any, tuple[Any, ...]]]
    ) -> None:
        fetched = _on_all("fetching a snapshot", fetches)
        missing = [name for name, there in zip(fetches, fetched, strict=True) if not there]
        if missing:
            raise RecoveryFailed(
                f"there is no snapshot {snapshot.number} of {named(missing)}: start as many workers as before, under "
                "the same names, and pass a directory that all of them see"
            )
        elsewhere = [name for name in found.remote if name not in workers]
        if elsewhere:
            raise RecoveryFailed(
                f"the build function has built objects on {named(elsewhere)}, of which there is no snapshot: it must "
                "build the same every time"
            )
        others = [name for name in workers if name != self._driver]
        _on_all(
            "loading a snapshot",
            {name: (shares.load, (snapshot, found.remote.get(name, {}))) for name in others},
        )
        shares.load_values(snapshot, found.local)

    def drop_all(self, workers: list[str]) -> None:
        """Free all snapshots in the memory of these workers."""
        self._pushing = self._complete = None
        for name in workers:
            try:
                rpc_async(name, shares.drop, (self._run, self._number + 1))
            except TelegradError as error:  # lost, with what it held; or this worker has shut down
                _log.debug("worker %r cannot be told to drop snapshots: %s", name, error)

    def _folder(self, snapshot: _Snapshot) -> str | None:
        if self._directory is None or not snapshot.is_built:
            return None
        return str(files.folder_of(self._directory, snapshot.id.number, self._run.token))


def _succeeded(call: Future[None]) -> bool:
    """Return whether a call that is over has raised no error."""
    try:
        call.wait()
    except Exception as error:  # noqa: BLE001 - of a worker that was lost, or had lost another one
        _log.debug("a snapshot is not complete: %s", error)
        return False
    return True


def _on_all(what: str, calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    try:
        return run_on_all(
            what,
            [(name, partial(rpc_async, name, function, args, timeout=0)) for name, (function, args) in calls.items()],
        )
    except WorkersFailed as failed:
        for error in failed.errors.values():
            if isinstance(error, RecoveryFailed):
                raise error from failed
        raise
