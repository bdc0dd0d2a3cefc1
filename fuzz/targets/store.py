"""Entries of the rendezvous store, which anybody on the network may be able to write.

An input is a JSON array: who reads and who wrote the entry, under which names, what the entry is read as, and its
value. Any other input is the text of an entry, and the packed list of a group. An epoch is also used as a worker does
that comes to the store: it reads the members, joins them, and begins the next epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it in __all__

from fuzz.mutators import mutate_json
from fuzz.target import Target
from telegrad import rendezvous
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.packed_group import PackedGroup
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import RendezvousError
from telegrad.rendezvous_members import Noticeboard, read_current, swap_current
from telegrad.rendezvous_records import (
    MAX_LIST,
    MAX_RECORD,
    Confirmation,
    Departure,
    Epoch,
    Outcome,
    Records,
    Registration,
    check_record,
    claimed_epoch,
)

_STORE = HashStore()
GROUPS = (
    Records(derive_keys(b"the token of the group, 32 bytes"), _STORE),
    Records(derive_keys(b"another group's token, 32 bytes."), _STORE),
    Records(None, _STORE),
)
"""Two groups with tokens, and one without."""
KINDS: tuple[type, ...] = (Registration, Confirmation, Outcome, Epoch, Departure)
_KEYS = derive_keys(b"the token of the group, 32 bytes")
_ME = Registration(WorkerRecord("b", 1, 6, ("tcp://[::1]:81",)), 2, 18, "machine")


_MANY = 1000


def _run(data: bytes) -> None:
    try:
        program = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        program = None
    if isinstance(program, list) and len(program) == 6 and all(type(part) is int for part in program[:3]):
        _run_entry(*program)
        return
    assert len(claimed_epoch(data)) < 64
    _read_group(data)
    for kind in KINDS:
        assert _read(GROUPS[0], "rank/0", data, kind) is None, "a text without the token was accepted"
        _read(GROUPS[2], "rank/0", data, kind)


def _read_group(data: bytes) -> None:
    """Look at a list of a group as a worker does that has read it."""
    try:
        group = PackedGroup(data)
        assert len(group.samples) <= len(group)
        for record in group:
            found = group.find(record.name)
            assert found is None or found.name == record.name
            group.confirm(record)
    except RendezvousError as error:
        _check_text(error)


def _run_entry(reader: int, writer: int, number: int, written_as: Any, read_as: Any, value: Any) -> None:
    reader, writer = reader % len(GROUPS), writer % len(GROUPS)
    if not isinstance(written_as, str) or not isinstance(read_as, str):
        return
    text = GROUPS[writer].encode(written_as, value).encode()
    entry = _read(GROUPS[reader], read_as, text, KINDS[number % len(KINDS)])
    if entry is not None:
        assert reader == writer, "an entry of another group was accepted"
        assert written_as == read_as or reader == 2, "an entry was accepted under another name"


def _read(group: Records, name: str, data: bytes, kind: type) -> object | None:
    """Return an entry as a rendezvous uses it; None if it is refused."""
    try:
        limit = MAX_LIST if kind is Epoch else MAX_RECORD
        entry: object = group.decode(name, data, kind, "the record of rank 0", limit)
    except RendezvousError as error:
        _check_text(error)
        return None
    if isinstance(entry, Registration):
        assert len(str(entry)) <= MAX_RECORD
        try:
            check_record(entry.record, 0)
        except RendezvousError as error:
            _check_text(error)
    elif isinstance(entry, Outcome):
        assert entry.status == "complete" or entry.status in rendezvous._ERRORS
    elif isinstance(entry, Epoch):
        try:
            _use_epoch(entry)
        except RendezvousError as error:
            _check_text(error)
    return entry


def _use_epoch(epoch: Epoch) -> None:
    """Do with an epoch of the group what a worker does that finds it in the store."""
    store = HashStore()
    store.set("current", GROUPS[0].encode("current", epoch, MAX_LIST))
    text, current = read_current(store, _KEYS)
    assert current == epoch
    assert len(epoch.prefix) < 64
    board = Noticeboard(store, _KEYS, epoch, _ME)
    if epoch.world_size <= _MANY:  # each costs two lookups
        assert len(board.read_members()) <= epoch.world_size
    board.leave()
    assert not board.is_over()
    board.publish(replace(_ME.record, generation=1))
    _, current = read_current(store, _KEYS)
    assert current is not None
    assert current.group == epoch.group
    if not epoch.world_size:
        assert len({member.record.id for member in current.members}) == len(current.members)
        assert len({member.record.name for member in current.members}) == len(current.members)
    store.set("current", text)
    assert swap_current(store, _KEYS, text, replace(epoch, number=epoch.number + 1))
    read_current(store, _KEYS)


def _check_text(error: RendezvousError) -> None:
    """Check that an error can be shown."""
    assert len(str(error).encode()) <= 2 * MAX_RECORD


def _seeds() -> Iterable[bytes]:
    record = WorkerRecord("a", 0, 5, ("unix:///run/a.sock", "tcp://[::1]:80", "tcp://host:1"), "host", "main", True)
    values = (
        ("rank/0", Registration(record, 2, 17, "machine")),
        ("confirmed/0", Confirmation("0" * 64)),
        ("outcome", Outcome("duplicate", "two workers are called 'a'")),
        ("current", Epoch(3, 2**62, 0, (Registration(record, 0, 17, "machine", 2, True),))),
        ("departed/0", Departure(5)),
    )
    for number, (name, value) in enumerate(values):
        for reader, writer in ((0, 0), (0, 1), (0, 2), (2, 0), (2, 2)):
            yield msgspec.json.encode((reader, writer, number, name, name, value))
        yield msgspec.json.encode((0, 0, number, "rank/1", name, value))
        if name == "current":
            yield msgspec.json.encode((0, 0, number, name, name, Epoch(1, 7, 2)))
        yield from (group.encode(name, value).encode() for group in GROUPS[1:])


STORE = Target("store", _run, (RendezvousError,), _seeds, mutate_json)
