"""Exchanges the records of all workers of a new group through one of torch's stores.

This is one *epoch* of a store. `telegrad.rendezvous_epochs` decides which epoch a worker takes part in. The rules:

1. A worker *registers* its name, then its rank. Each registration is one compare-and-set, so one of two conflicting
   workers sees the other. The rank comes last: once every rank is registered, all conflicts have been found.
2. When every rank is registered, one worker writes the list of all registrations (`telegrad.rendezvous_roster`). Each
   worker reads it, checks that its own is among them, and *confirms* them: it writes their digest.
3. The group has one *outcome*, again a compare-and-set. A worker that sees every confirmation checks that they are
   equal, and sets "complete" and the digest. One that sees a conflict or times out sets the reason. The first outcome
   holds for everybody, so either all workers continue or none does. A worker that arrives later fails alone. A worker
   that fails for a reason of its own sets that as the outcome, so nobody waits for it. "Superseded" is not an error:
   all meet again in another epoch.
4. When the group is complete, each worker checks that its digest is that of what it has read itself.
5. A worker that has read the outcome signs off. Rank 0, whose process may host the store and exit right after this,
   waits until all have signed off.

The store is not trusted. In a group with a token, every entry is authenticated (`telegrad.rendezvous_records`), so a
store, or whoever can write into it, can delete entries and repeat old ones, but make none. Repeating does not help:
every registration has the random incarnation of its worker, so a confirmation of this very set of registrations exists
only if each worker of the set has read it now, and an outcome with its digest only if all these exist. Old outcomes can
only stop a group from forming, which a store can do anyway. One thing remains: of two groups that form at the same time
with the same token and size, a hostile store can exchange workers. So give every group its own token.

Workers with different tokens find each other's entries unauthenticated, and all fail at once with an error that says
so: whoever finds one writes an outcome, which the others cannot authenticate either.

The code polls ``store.check`` rather than call ``store.wait``, which logs a warning on every timeout (TCPStore), rounds
to whole seconds (FileStore), and cannot be interrupted from the keyboard. It never polls with the keys of all workers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, NoReturn

from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.connection.group_keys import GroupKeys
from telegrad.connection.packed_group import PackedGroup
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import DuplicateWorker, RendezvousError, RendezvousTimeout, StoreLost, UnauthenticatedRecord
from telegrad.rendezvous_file import SharedFileStore
from telegrad.rendezvous_records import Confirmation, Outcome, Records, Registration, check_record
from telegrad.rendezvous_roster import Key, absent, completes, has_roster, read_roster, sign_off, write_roster
from telegrad.rendezvous_store import MAX_TIMEOUT, WaitLog, check_rank, pause

FAILURE_LINGER = 2.0
"""Seconds for which rank 0 keeps the store open for others after a failure, even if the timeout has passed."""
_SIGN_OFF_LIMIT = 10.0  # seconds for which rank 0 waits for workers that have read the outcome

_MAX_LISTED = 32  # workers that an error names, so that it fits into the store and on a screen
_MAX_TEXT = 2000  # characters of an error of another kind that the others get
_FULL_DISK = ("No space left on device", "Disk quota exceeded")
_FIRST = "first"
_OUTCOME = "outcome"


class Superseded(RendezvousError):
    """The workers of this epoch are to meet again in another one."""


_ERRORS: dict[str, type[RendezvousError]] = {
    "duplicate": DuplicateWorker,
    "timeout": RendezvousTimeout,
    "error": RendezvousError,
    "superseded": Superseded,
    "interrupted": RendezvousError,
}
Status = Literal["complete", "duplicate", "timeout", "error", "superseded", "interrupted"]


def read_outcome(store: Store, records: Records) -> Outcome:
    """Return the outcome of an epoch that has one."""
    return records.decode(_OUTCOME, store.get(_OUTCOME), Outcome, "the result of the rendezvous")


def has_outcome(store: Store) -> bool:
    """Return whether an epoch has an outcome."""
    return store.check([_OUTCOME])


def set_outcome(store: Store, records: Records, status: Status, message: str = "", digest: str = "") -> Outcome:
    """Set the outcome of an epoch unless it has one, and return what it is then."""
    mine = records.encode(_OUTCOME, Outcome(status, message, time.time(), digest))
    data = store.compare_set(_OUTCOME, "", mine)
    return records.decode(_OUTCOME, data, Outcome, "the result of the rendezvous")


def report_failure(store: Store, records: Records, who: str, error: BaseException) -> None:
    """Set an error of this worker as the outcome of an epoch, so that the others do not wait for it."""
    text = (str(error).splitlines() or [""])[0][:_MAX_TEXT]
    if isinstance(error, DuplicateWorker):
        set_outcome(store, records, "duplicate", text)
        return
    if not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit
        set_outcome(store, records, "interrupted", f"{who} was interrupted in init_rpc ({type(error).__name__})")
        return
    kind = "" if isinstance(error, RendezvousError) else f"{type(error).__name__}: "
    set_outcome(store, records, "error", f"{who} failed in init_rpc: {kind}{text}")


def raise_outcome(outcome: Outcome) -> NoReturn:
    """Raise the error that all workers of an epoch get."""
    raise _ERRORS[outcome.status](outcome.message)


def assemble(
    store: Store,
    me: WorkerRecord,
    keys: GroupKeys | None,
    world_size: int,
    timeout: float,
    listen_if_needed: Callable[[Sequence[WorkerRecord]], None] = lambda records: None,
    *,
    epoch: str = "",
    restart: int = -1,
    is_stale: Callable[[Registration], bool] = lambda registration: False,
) -> PackedGroup:
    """Register `me`, wait until all workers have registered, and return the records of all by id.

    `listen_if_needed` is called with the records before this worker confirms them. So when the group is complete, it
    has returned on all workers: nobody connects to a worker that does not listen yet.

    Every group needs its own store or PrefixStore. Raises DuplicateWorker, RendezvousTimeout, UnauthenticatedRecord,
    StoreLost or RendezvousError. If the group cannot be completed, all waiting workers raise the same error.

    `epoch` is the name of the epoch, which all entries are bound to. `restart` is that of `Registration`. `is_stale`
    says of a worker with this name or rank whether it is dead: then all raise Superseded instead of DuplicateWorker.
    """
    check_rank(me.id, world_size)
    with store_errors(store, f"worker {me.name!r} (rank {me.id})"):
        mine = Registration(me, world_size, os.getpid(), socket.gethostname(), restart)
        return _Rendezvous(store, mine, Records(keys, store, epoch), timeout, listen_if_needed, is_stale).run()


@contextmanager
def store_errors(store: Store, who: str) -> Iterator[None]:
    """Raise the errors of torch's stores inside the block as those of telegrad."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__module__.startswith("telegrad"):
            raise
        if any(words in str(error) for words in _FULL_DISK):
            raise RendezvousError(
                f"{who} cannot write to the rendezvous store{_path_of(store)}: {error}. Remove files there, or choose "
                "an init_method on another file system"
            ) from error
        if _path_of(store):
            raise StoreLost(
                f"{who} lost the rendezvous store before the group was complete: {error}. Start all workers again, "
                "with a file that nothing else uses"
            ) from error
        raise StoreLost(
            f"{who} lost the rendezvous store before the group was complete: {error}. The process that hosts the "
            "store, usually rank 0, has probably exited: check its output"
        ) from error


class _Rendezvous:
    """The rendezvous of one worker."""

    def __init__(
        self,
        store: Store,
        mine: Registration,
        records: Records,
        timeout: float,
        listen_if_needed: Callable[[Sequence[WorkerRecord]], None] = lambda records: None,
        is_stale: Callable[[Registration], bool] = lambda registration: False,
    ) -> None:
        self._store = store
        self._listen_if_needed = listen_if_needed
        self._is_stale = is_stale
        self._records = records
        self._mine = mine
        self._me = me = mine.record
        self._ranks = range(mine.world_size)
        self._records.encode(_rank_key(me.id), self._mine)  # raises if it is too large
        check_record(me, me.id)
        self._start = time.monotonic()
        self._deadline = self._start + min(timeout, MAX_TIMEOUT)
        self._who = f"worker {me.name!r} (rank {me.id})"
        self._waits = WaitLog(self._who)

    def run(self) -> PackedGroup:
        """Perform the rendezvous, and return the records of all workers."""
        store, me = self._store, self._me
        registered = False
        try:
            self._register()
            registered = True
            group = self._complete()
        except RendezvousError as error:
            # Unless there is one, so that the others do not wait. Workers with another token cannot read it, and fail.
            with suppress(UnauthenticatedRecord):  # there is one of theirs, and `error` says so
                report_failure(store, self._records, self._who, error)
            gone = set(absent(store, _rank_key, self._ranks)) if me.id == 0 else set()
            present = [rank for rank in self._ranks if rank not in gone]
            sign_off(store, me.id, registered, present, time.monotonic() + FAILURE_LINGER)
            raise
        except BaseException as error:
            report_failure(store, self._records, self._who, error)
            raise
        sign_off(store, me.id, registered, self._ranks, min(self._deadline, time.monotonic() + _SIGN_OFF_LIMIT))
        return group

    # -- registering ------------------------------------------------------------------------------------------

    def _register(self) -> None:
        """Register this worker's name and rank. A conflict becomes the outcome for everybody and is raised."""
        mine, record = self._mine, self._mine.record
        first = self._compare_set(_FIRST, "the record of the worker that came first")
        if first.world_size != mine.world_size:
            self._check_stale(first)
            message = f"the world sizes differ: {first} was started for {first.world_size} workers, but {mine} for "
            self._fail("error", f"{message}{mine.world_size}. Pass the same world size to all workers")
        holder = self._compare_set(f"name/{record.name}", f"the record of worker {record.name!r}")
        if holder.record.id != record.id:
            self._check_stale(holder)
            message = f"two workers are called {record.name!r}: {holder} and {mine}. Give each worker its own name"
            self._fail("duplicate", message)
        holder = self._compare_set(_rank_key(record.id), f"the record of rank {record.id}")
        if holder != mine:
            self._check_stale(holder)
            message = f"two workers have rank {record.id}: {holder} and {mine}. Give each worker its own rank"
            self._fail("duplicate", message + _leftover_hint(self._store))

    def _compare_set(self, name: str, what: str) -> Registration:
        """Set an entry to this worker's registration unless it is set, and return what it is then."""
        data = self._store.compare_set(name, "", self._records.encode(name, self._mine))
        return self._records.decode(name, data, Registration, what)

    def _check_stale(self, holder: Registration) -> None:
        """If a worker that is in the way of this one is dead, let all meet again without it."""
        if self._is_stale(holder):
            message = f"{holder} registered here and ended, and {self._mine} was started instead"
            set_outcome(self._store, self._records, "superseded", message)
            raise Superseded(message)

    def _fail(self, status: Literal["duplicate", "error"], message: str) -> NoReturn:
        """Set the outcome of the group unless it has one, and raise this one in any case."""
        set_outcome(self._store, self._records, status, message)
        raise _ERRORS[status](message)

    # -- waiting ----------------------------------------------------------------------------------------------

    def _complete(self) -> PackedGroup:
        """Return the records of all workers when the group is complete. Raises an error if it fails."""
        store = self._store
        group: PackedGroup | None = None
        if completes(store, _rank_key, self._me.id, self._mine.world_size):
            self._write_roster()
        while not store.check([_OUTCOME]):
            if group is None and has_roster(store):
                group = self._confirm()
            elif time.monotonic() >= self._deadline:
                self._time_out()
            else:
                self._waits.log_if_due(self._waited_for)
                pause(self._start, self._deadline)
        outcome = read_outcome(store, self._records)
        if outcome.status != "complete":
            raise_outcome(outcome)
        if group is None:
            raise UnauthenticatedRecord(
                f"the rendezvous store says that the group is complete, but worker {self._me.name!r} (rank "
                f"{self._me.id}) has not confirmed it: somebody repeats entries of an earlier group"
            )
        if outcome.digest != group.digest:
            raise self._records_differ("the others")
        return group

    def _write_roster(self) -> None:
        self._require(_rank_key)
        write_roster(self._store, self._records, [one.record for one in self._read_registrations(self._ranks)])

    def _confirm(self) -> PackedGroup:
        """Read the list of all workers, and confirm it to the others."""
        store, me = self._store, self._me
        group = read_roster(store, self._records, self._mine.world_size)
        if not group.confirm(me):
            raise UnauthenticatedRecord(
                f"the record of worker {me.name!r} (rank {me.id}) in the rendezvous store was replaced: somebody else "
                "writes into the store"
            )
        self._listen_if_needed(group)
        name, digest = _confirmation_key(me.id), group.digest
        store.set(name, self._records.encode(name, Confirmation(digest)))
        if completes(store, _confirmation_key, me.id, self._mine.world_size):
            self._check_confirmations(digest)
            set_outcome(store, self._records, "complete", digest=digest)
        return group

    def _require(self, key: Key) -> None:
        """Raise an error if an entry is missing that should exist. To read it would block."""
        if not self._store.check([key(rank) for rank in self._ranks]):
            raise UnauthenticatedRecord(
                f"entries are missing in the rendezvous store ({key(0)!r} to {key(self._ranks[-1])!r}): somebody "
                "deletes entries, or repeats those of an earlier group"
            )

    def _check_confirmations(self, digest: str) -> None:
        self._require(_confirmation_key)
        values = self._store.multi_get([_confirmation_key(rank) for rank in self._ranks])
        for rank, value in zip(self._ranks, values, strict=True):
            what = f"the confirmation of rank {rank}"
            if self._records.decode(_confirmation_key(rank), value, Confirmation, what).digest != digest:
                raise self._records_differ(f"rank {rank}")

    def _records_differ(self, who: str) -> UnauthenticatedRecord:
        return UnauthenticatedRecord(
            f"worker {self._me.name!r} (rank {self._me.id}) and {who} found different records in the rendezvous store: "
            "somebody changes them, or repeats those of an earlier group"
        )

    def _read_registrations(self, ranks: Sequence[int]) -> list[Registration]:
        if not ranks:
            return []
        registrations = []
        for rank, value in zip(ranks, self._store.multi_get([_rank_key(rank) for rank in ranks]), strict=True):
            what = f"the record of rank {rank}"
            registration = self._records.decode(_rank_key(rank), value, Registration, what)
            check_record(registration.record, rank)
            registrations.append(registration)
        return registrations

    def _waited_for(self) -> str:
        """Return whom this worker waits for, for the log."""
        is_listed = has_roster(self._store)
        missing = absent(self._store, _confirmation_key if is_listed else _rank_key, self._ranks)
        if not missing and not is_listed:  # whoever was about to write it is dead
            self._write_roster()
        return f"{_list_ranks(missing)} of {len(self._ranks)} workers to join the group" if missing else ""

    def _time_out(self) -> None:
        """Set the outcome because the time is over."""
        if absent(self._store, _rank_key, self._ranks) or absent(self._store, _confirmation_key, self._ranks):
            set_outcome(self._store, self._records, "timeout", self._timed_out())
            return
        # The last worker died between its confirmation and the outcome. Calls to it will fail.
        digest = read_roster(self._store, self._records, self._mine.world_size).digest
        self._check_confirmations(digest)
        set_outcome(self._store, self._records, "complete", digest=digest)

    def _timed_out(self) -> str:
        waited, size = time.monotonic() - self._start, len(self._ranks)
        missing = absent(self._store, _rank_key, self._ranks)
        if not missing:
            silent = absent(self._store, _confirmation_key, self._ranks)
            return (
                f"all {size} workers registered, but some ended before the group was complete, within {waited:.3g} s: "
                f"{_list_ranks(silent)}. Check their output"
            )
        present = sorted(set(self._ranks) - set(missing))
        listed = [registration.record for registration in self._read_registrations(present[:_MAX_LISTED])]
        names = ", ".join(f"{record.name!r} (rank {record.id})" for record in listed)
        more = f" and {len(present) - _MAX_LISTED} more" if len(present) > _MAX_LISTED else ""
        return (
            f"{len(missing)} of {size} workers did not join within {waited:.3g} s: {_list_ranks(missing)}. "
            f"Workers that joined: {names}{more}. Check the output of the missing ones, or raise the timeout"
        )


def _path_of(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f" {store.path}" if isinstance(store, FileStore | SharedFileStore) else ""  # type: ignore[union-attr]  # stubs


def _leftover_hint(store: Store) -> str:
    if not _path_of(store):
        return ""
    return ". If the first one is from an earlier run, delete the rendezvous file that it left behind"


def _rank_key(rank: int) -> str:
    return f"rank/{rank}"


def _confirmation_key(rank: int) -> str:
    return f"confirmed/{rank}"


def _list_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text with consecutive ones abbreviated: ``ranks 1, 4-7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:_MAX_LISTED])
    text += ", and more" if len(runs) > _MAX_LISTED else ""
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
