"""Exchanges the records of all workers of a group through one of torch's stores.

The rules:

1. A worker *registers* its name, then its rank. Each registration is one compare-and-set, so one of two conflicting
   workers sees the other. The rank comes last: once every rank is registered, all conflicts have been found.
2. The group has one *outcome*, again a compare-and-set. A worker that sees every rank registered sets "complete", and
   one that sees a conflict or times out sets the reason. The first outcome holds for everybody, so either all workers
   continue or none does. A worker that arrives later fails alone.
3. If the group needs TCP, a worker opens its port when it has read the records, and waits until all have done so.
4. A worker that has read the outcome signs off and does not use the store again. Rank 0, whose process may host the
   store, waits until all have signed off.

The store is not trusted: its contents are plain data, limited in size and validated. The code polls ``store.check``
rather than call ``store.wait``, which logs a warning on every timeout (TCPStore), rounds to whole seconds (FileStore),
and cannot be interrupted from the keyboard.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn

import msgspec
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.connection.worker_record import WorkerRecord, check_id, check_name
from telegrad.errors import DuplicateWorker, RendezvousError, RendezvousTimeout
from telegrad.rendezvous_store import MAX_TIMEOUT, check_rank, pause
from telegrad.transport.addresses import parse_address

MAX_RECORD = 64 * 1024
FAILURE_LINGER = 2.0
"""Seconds for which rank 0 keeps the store open for others after a failure, even if the timeout has passed."""

_MAX_LISTED = 32
"""How many workers an error names, so that it fits into the store and on a screen."""

_FULL_DISK = ("No space left on device", "Disk quota exceeded")
_FIRST = "first"
_ALL_LISTEN = "all listen"
_OUTCOME = "outcome"


class Registration(msgspec.Struct, frozen=True):
    """A worker's entry in the store: its record, and its process for error messages."""

    record: WorkerRecord
    world_size: int
    pid: int
    machine: str

    def __str__(self) -> str:
        return f"worker {self.record.name!r} (rank {self.record.id}, pid {self.pid} on {self.machine})"


class Outcome(msgspec.Struct, frozen=True):
    """Whether the group is complete, or why not."""

    status: Literal["complete", "duplicate", "timeout", "error"]
    message: str = ""


_ERRORS: dict[str, type[RendezvousError]] = {
    "duplicate": DuplicateWorker,
    "timeout": RendezvousTimeout,
    "error": RendezvousError,
}


def assemble(
    store: Store,
    me: WorkerRecord,
    world_size: int,
    timeout: float,
    listen_if_needed: Callable[[list[WorkerRecord]], bool] = lambda records: False,
) -> list[WorkerRecord]:
    """Register `me`, wait until all workers have registered, and return the records of all by id.

    `listen_if_needed` is called with the records. If it returns True, which it must do on all workers or on none, this
    also waits until it has returned on all: nobody may connect to a worker that does not listen yet.

    Every group needs its own store or PrefixStore. Raises DuplicateWorker, RendezvousTimeout or RendezvousError. If the
    group cannot be completed, all waiting workers raise the same error.
    """
    check_rank(me.id, world_size)
    mine = Registration(me, world_size, os.getpid(), socket.gethostname())
    if len(_encode(mine)) > MAX_RECORD:
        raise RendezvousError(f"the record of worker {me.name!r} has more than {MAX_RECORD} bytes")
    _check(mine, me.id)
    start = time.monotonic()
    deadline = start + min(timeout, MAX_TIMEOUT)
    ranks = range(world_size)
    registered = False
    try:
        try:
            _register(store, mine)
            registered = True
            _wait_for_outcome(store, mine, start, deadline)
            registrations = _read_registrations(store, ranks)
            if listen_if_needed([registration.record for registration in registrations]):
                _wait_until_all_listen(store, me, world_size, start, deadline)
        except RendezvousError:
            present = _registered_ranks(store, world_size)
            _sign_off(store, me.id, registered, present, time.monotonic() + FAILURE_LINGER)
            raise
        _sign_off(store, me.id, registered, ranks, deadline)
    except RuntimeError as error:
        if isinstance(error, RendezvousError):
            raise
        if any(words in str(error) for words in _FULL_DISK):
            raise RendezvousError(
                f"worker {me.name!r} (rank {me.id}) cannot write to the rendezvous store{_path_of(store)}: {error}. "
                "Remove files there, or choose an init_method on another file system"
            ) from error
        raise RendezvousError(
            f"worker {me.name!r} (rank {me.id}) lost the rendezvous store before the group was complete: {error}. The "
            "process that hosts the store, usually rank 0, has probably exited: check its output"
        ) from error
    return [registration.record for registration in registrations]


# Registering and waiting


def _register(store: Store, mine: Registration) -> None:
    """Register this worker's name and rank. A conflict becomes the outcome for everybody and is raised."""
    first = _compare_set(store, _FIRST, mine, "the first worker")
    if first.world_size != mine.world_size:
        message = f"the world sizes differ: {first} was started for {first.world_size} workers, but {mine} for "
        _fail(store, Outcome("error", f"{message}{mine.world_size}. Pass the same world size to all workers"))
    holder = _compare_set(store, f"name/{mine.record.name}", mine, f"worker {mine.record.name!r}")
    if holder.record.id != mine.record.id:
        message = f"two workers are called {mine.record.name!r}: {holder} and {mine}. Give each worker its own name"
        _fail(store, Outcome("duplicate", message))
    holder = _compare_set(store, _rank_key(mine.record.id), mine, f"rank {mine.record.id}")
    if holder != mine:
        message = f"two workers have rank {mine.record.id}: {holder} and {mine}. Give each worker its own rank"
        _fail(store, Outcome("duplicate", message + _leftover_hint(store)))


def _compare_set(store: Store, key: str, mine: Registration, whose: str) -> Registration:
    """Set `key` to `mine` unless it is set, and return its registration: `mine`, or that of an earlier worker."""
    return _decode_registration(store.compare_set(key, "", _encode(mine)), whose)


def _path_of(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f" {store.path}" if isinstance(store, FileStore) else ""  # type: ignore[attr-defined]  # not in the stubs


def _leftover_hint(store: Store) -> str:
    if not _path_of(store):
        return ""
    return ". If the first one is from an earlier run, delete the rendezvous file that it left behind"


def _fail(store: Store, outcome: Outcome) -> NoReturn:
    """Set the outcome of the group unless it has one, and raise this one in any case."""
    store.compare_set(_OUTCOME, "", _encode(outcome))
    raise _ERRORS[outcome.status](outcome.message)


def _wait_for_outcome(store: Store, mine: Registration, start: float, deadline: float) -> None:
    """Return when the group is complete. Raises an error if it fails."""
    keys = [_rank_key(rank) for rank in range(mine.world_size)]
    # The store serializes operations, so the last worker to register sees all registrations here.
    if store.check(keys):
        store.compare_set(_OUTCOME, "", _encode(Outcome("complete")))
    while not store.check([_OUTCOME]):
        if time.monotonic() >= deadline:
            store.compare_set(_OUTCOME, "", _encode(_timed_out(store, mine, time.monotonic() - start)))
        else:
            pause(start, deadline)
    outcome = _decode_outcome(store.get(_OUTCOME))
    if outcome.status != "complete":
        raise _ERRORS[outcome.status](outcome.message)


def _wait_until_all_listen(store: Store, me: WorkerRecord, world_size: int, start: float, deadline: float) -> None:
    """Announce that this worker listens, and return when all do. The last one tells the others."""
    store.set(f"listening/{me.id}", "1")
    if store.add("listening", 1) == world_size:
        store.set(_ALL_LISTEN, "1")
    while not store.check([_ALL_LISTEN]):
        if time.monotonic() >= deadline:
            missing = [rank for rank in range(world_size) if not store.check([f"listening/{rank}"])]
            raise RendezvousTimeout(
                f"worker {me.name!r} (rank {me.id}) knows all workers, but {_list_ranks(missing)} did not begin to "
                f"listen within {time.monotonic() - start:.3g} s. Check their output, or raise the timeout"
            )
        pause(start, deadline)


def _registered_ranks(store: Store, world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if store.check([_rank_key(rank)])]


def _timed_out(store: Store, mine: Registration, waited: float) -> Outcome:
    ranks = _registered_ranks(store, mine.world_size)
    missing = sorted(set(range(mine.world_size)) - set(ranks))
    if not missing:
        # The last worker died between its registration and the outcome. Calls to it will fail.
        return Outcome("complete")
    listed = _read_registrations(store, ranks[:_MAX_LISTED])
    present = [f"{registration.record.name!r} (rank {registration.record.id})" for registration in listed]
    more = f" and {len(ranks) - _MAX_LISTED} more" if len(ranks) > _MAX_LISTED else ""
    return Outcome(
        "timeout",
        f"{len(missing)} of {mine.world_size} workers did not join within {waited:.3g} s: {_list_ranks(missing)}. "
        f"Workers that joined: {', '.join(present)}{more}. Check the output of the missing ones, or raise the timeout",
    )


def _sign_off(store: Store, rank: int, registered: bool, expected: Sequence[int], deadline: float) -> None:
    """Announce that this worker no longer needs the store. Rank 0 also waits until all `expected` ranks have done so.

    Only the worker that registered the rank signs off for it, not another that tried to. The announcement needs no
    reply (TCPStore sends none), so rank 0 may exit as soon as it has seen the last. A worker that died meanwhile is not
    an error here: calls to it will fail.
    """
    if registered:
        store.set(f"left/{rank}", "1")
    if rank == 0:
        start = time.monotonic()
        keys = [f"left/{other}" for other in expected]
        while keys and time.monotonic() < deadline and not store.check(keys):
            pause(start, deadline)


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


# Encoding of the store's entries


def _rank_key(rank: int) -> str:
    return f"rank/{rank}"


def _encode(value: Registration | Outcome) -> str:
    return msgspec.json.encode(value).decode()


def _read_registrations(store: Store, ranks: Sequence[int]) -> list[Registration]:
    if not ranks:
        return []
    values = store.multi_get([_rank_key(rank) for rank in ranks])
    registrations = []
    for rank, value in zip(ranks, values, strict=True):
        registration = _decode_registration(value, f"rank {rank}")
        _check(registration, rank)
        registrations.append(registration)
    return registrations


def _decode_registration(value: bytes, whose: str) -> Registration:
    if len(value) > MAX_RECORD:
        raise RendezvousError(f"the record of {whose} in the rendezvous store has more than {MAX_RECORD} bytes")
    try:
        return msgspec.json.decode(value, type=Registration)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RendezvousError(f"cannot read the record of {whose} in the rendezvous store: {error}") from error


def _check(registration: Registration, rank: int) -> None:
    record = registration.record
    try:
        if check_id(record.id) != rank:
            raise ValueError(f"it belongs to rank {record.id}")
        check_name(record.name)
        if not 0 <= record.incarnation < 2**64:
            raise ValueError(f"incarnation {record.incarnation} does not fit in 64 bits")
        for address in record.addresses:
            parse_address(address)
    except ValueError as error:
        raise RendezvousError(f"the record of rank {rank} is invalid: {error}") from error


def _decode_outcome(value: bytes) -> Outcome:
    try:
        if len(value) > MAX_RECORD:
            raise ValueError(f"it has more than {MAX_RECORD} bytes")
        return msgspec.json.decode(value, type=Outcome)
    except (msgspec.DecodeError, ValueError) as error:
        raise RendezvousError(f"cannot read the outcome in the rendezvous store: {error}") from error
