"""The entries of the rendezvous store, and their authentication.

An entry is text: the protocol version, a MAC, and JSON. The MAC is an HMAC-SHA256 under the group's store key over the
version, the entry's name in the store (with its epoch, if it belongs to one), and the JSON. So nobody without the token
can write or change an entry, or move one to another name or epoch. What can be replayed, and why that does not help, is
told in `telegrad.rendezvous` and `telegrad.rendezvous_epochs`. Without a token there is no MAC.

Everything that is read from the store is plain data, limited in size, and checked.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal, TypeVar

import msgspec
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in __all__
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from telegrad.connection import worker_record
from telegrad.connection.group_keys import GroupKeys, authenticate
from telegrad.connection.worker_record import MAX_ID, WorkerRecord
from telegrad.errors import RendezvousError, UnauthenticatedRecord
from telegrad.rendezvous_file import SharedFileStore
from telegrad.wire.frames import VERSION

MAX_RECORD = 64 * 1024
MAX_LIST = 1024 * MAX_RECORD
"""Bytes of an entry that lists the members of an open group."""
_NO_MAC = "-"

Entry = TypeVar("Entry")


class Registration(msgspec.Struct, frozen=True):
    """A worker's entry in the store: its record, and its process for error messages."""

    record: WorkerRecord
    world_size: int
    """0 in an open group."""
    pid: int
    """0 if another worker wrote this entry."""
    machine: str
    restart: int = -1
    """How often its launcher has started the worker before; -1 without a launcher that starts workers again."""
    left: bool = False
    """Whether the worker has left an open group in order. Its name and its id stay its own."""
    lost: bool = False
    """Whether other members of an open group have lost the worker."""

    @property
    def gone(self) -> bool:
        """Whether the worker has left, or was lost."""
        return self.left or self.lost

    def __str__(self) -> str:
        process = f", pid {self.pid} on {self.machine}" if self.pid else ""
        return f"worker {self.record.name!r} (rank {self.record.id}{process})"


class Confirmation(msgspec.Struct, frozen=True):
    """A worker has read the list of all workers, and found itself in it."""

    digest: str
    """The digest of the list of all workers; see `PackedGroup`."""


class Outcome(msgspec.Struct, frozen=True):
    """Whether the group is complete, or why not. After "superseded", the workers meet again in another epoch."""

    status: Literal["complete", "duplicate", "timeout", "error", "superseded", "interrupted"]
    message: str = ""
    time: float = 0.0
    """When it was decided, in seconds since 1970 on the clock of the worker that decided it."""
    digest: str = ""
    """If the group is complete: of the list that all its workers have confirmed."""


class Epoch(msgspec.Struct, frozen=True):
    """One attempt to form a group, and the group that it formed."""

    number: int
    group: int
    """A random number that identifies the group, in another store too."""
    world_size: int
    """0: an open group."""
    members: tuple[Registration, ...] = ()
    """The members of an open group."""

    @property
    def prefix(self) -> str:
        """The prefix of its entries in the store."""
        return f"{self.number}-{self.group:016x}"


class Departure(msgspec.Struct, frozen=True):
    """A member has left its group, or is about to."""

    incarnation: int


def describe_store(store: Store) -> str:
    """Return where a store is, for error messages."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"at {store.host}:{store.port}"
    if isinstance(store, FileStore | SharedFileStore):
        return f"in the file {store.path}"  # type: ignore[union-attr]  # torch's stubs lack it
    return "of this process"


class Records:
    """Reads and writes the entries of one store with the key of one group."""

    def __init__(self, keys: GroupKeys | None, store: Store, epoch: str = "") -> None:
        self._key = keys.store if keys is not None else None
        self._where = describe_store(store)
        self._epoch = f"{epoch}/" if epoch else ""

    def encode(self, name: str, entry: object, limit: int = MAX_RECORD) -> str:
        """Return the text of an entry that will be stored as `name`."""
        json = msgspec.json.encode(entry).decode()
        if len(json) > limit:
            raise RendezvousError(f"the entry {name!r} of the rendezvous store would have more than {limit} bytes")
        return f"{VERSION} {self._mac(name, json)} {json}"

    def decode(self, name: str, data: bytes, kind: type[Entry], what: str, limit: int = MAX_RECORD) -> Entry:
        """Return the entry that is stored as `name`, and is called `what` in errors."""
        what = f"{what} in the rendezvous store {self._where}"
        if len(data) > limit + 256:
            raise RendezvousError(f"{what} has more than {limit} bytes")
        text = data.decode(errors="replace")
        version, _, rest = text.partition(" ")
        mac, _, json = rest.partition(" ")
        if version != str(VERSION) and version.isdecimal() and len(version) < 4:
            raise RendezvousError(
                f"{what} was written by a worker with protocol version {version}, but this worker speaks {VERSION}: "
                "install the same version of telegrad on every machine"
            )
        if version != str(VERSION) or not hmac.compare_digest(mac.encode(), self._mac(name, json).encode()):
            raise UnauthenticatedRecord(self._unauthenticated(what, mac, json))
        try:
            return msgspec.json.decode(json, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RendezvousError(f"cannot read {what}: {error}") from error

    def _mac(self, name: str, json: str) -> str:
        if self._key is None:
            return _NO_MAC
        return authenticate(self._key, "telegrad rendezvous", VERSION, self._epoch + name, json).hex()

    def _unauthenticated(self, what: str, mac: str, json: str) -> str:
        remedy = "Start every worker with the same TELEGRAD_TOKEN"
        claim = _claimed_author(json)
        if self._key is None and len(mac) == 2 * hashlib.sha256().digest_size:
            return f"{what} was written by a worker with a group token{claim}, but this worker has none. {remedy}"
        if self._key is None:
            return f"cannot read {what}: no worker of this version has written it"
        if mac == _NO_MAC and claim:
            return f"{what} was written by a worker without a group token{claim}, but this worker has one. {remedy}"
        return (
            f"{what} was not written with the token of this group{claim}: the tokens of the workers differ, or "
            f"somebody without the token writes into the store. {remedy}, and let nobody else reach the store"
        )


def _claimed_author(json: str) -> str:
    """Return who wrote an entry according to the entry, which may be a lie; empty if it does not say."""
    try:
        claimed = str(msgspec.json.decode(json, type=Registration))
    except (msgspec.DecodeError, RecursionError):
        return ""
    return f" (it says: by {claimed})" if claimed.isprintable() and len(claimed) < 400 else ""


def claimed_epoch(data: bytes) -> str:
    """Return the prefix of an epoch according to its entry, which is not authenticated; empty if it is not readable."""
    json = data.decode(errors="replace").partition(" ")[2].partition(" ")[2]
    try:
        epoch = msgspec.json.decode(json, type=Epoch)
    except (msgspec.DecodeError, RecursionError):
        return ""
    return epoch.prefix if 0 <= epoch.group < 2**63 and 0 <= epoch.number < 2**63 else ""


def check_record(record: WorkerRecord, rank: int) -> None:
    """Raise an error if a record is not valid for this rank."""
    try:
        worker_record.check_record(record)
        if record.id != rank:
            raise ValueError(f"it belongs to rank {record.id}")
    except ValueError as error:
        raise RendezvousError(f"the record of rank {rank} is invalid: {error}") from error


def check_epoch(epoch: Epoch) -> None:
    """Raise an error if an epoch is not valid. It may have been written without a token."""
    if not 0 <= epoch.group < 2**63:
        raise RendezvousError(f"the current epoch in the rendezvous store has an invalid group {epoch.group}")
    if not 0 <= epoch.number < 2**63:
        raise RendezvousError(f"the current epoch in the rendezvous store has an invalid number {epoch.number}")
    if not 0 <= epoch.world_size <= MAX_ID + 1:
        raise RendezvousError(f"the current epoch in the rendezvous store has an invalid size {epoch.world_size}")
    for member in epoch.members:
        check_record(member.record, member.record.id)
    names = {member.record.name for member in epoch.members}
    ids = {member.record.id for member in epoch.members}
    if len(names) < len(epoch.members) or len(ids) < len(epoch.members):
        raise RendezvousError("the current epoch in the rendezvous store lists a worker twice")
