"""Entries of the rendezvous store, which anybody on the network may be able to write.

An input is a JSON array: who reads and who wrote the entry, under which names, what the entry is read as, and its
value. Any other input is the text of an entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it in __all__

from fuzz.mutators import mutate_json
from fuzz.target import Target
from telegrad import rendezvous
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import RendezvousError
from telegrad.rendezvous_records import MAX_RECORD, Confirmation, Outcome, Records, Registration, check_record

_STORE = HashStore()
GROUPS = (
    Records(derive_keys(b"the token of the group, 32 bytes"), _STORE),
    Records(derive_keys(b"another group's token, 32 bytes."), _STORE),
    Records(None, _STORE),
)
"""Two groups with tokens, and one without."""
KINDS: tuple[type, ...] = (Registration, Confirmation, Outcome)


def _run(data: bytes) -> None:
    try:
        program = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        program = None
    if isinstance(program, list) and len(program) == 6 and all(type(part) is int for part in program[:3]):
        _run_entry(*program)
        return
    for kind in KINDS:
        assert _read(GROUPS[0], "rank/0", data, kind) is None, "a text without the token was accepted"
        _read(GROUPS[2], "rank/0", data, kind)


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
        entry: object = group.decode(name, data, kind, "the record of rank 0")
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
    return entry


def _check_text(error: RendezvousError) -> None:
    """Check that an error can be shown."""
    assert len(str(error).encode()) <= 2 * MAX_RECORD


def _seeds() -> Iterable[bytes]:
    record = WorkerRecord("a", 0, 5, ("unix:///run/a.sock", "tcp://[::1]:80", "tcp://host:1"), "host", "main", True)
    values = (
        ("rank/0", Registration(record, 2, 17, "machine")),
        ("confirmed/0", Confirmation("0" * 64)),
        ("outcome", Outcome("duplicate", "two workers are called 'a'")),
    )
    for number, (name, value) in enumerate(values):
        for reader, writer in ((0, 0), (0, 1), (0, 2), (2, 0), (2, 2)):
            yield msgspec.json.encode((reader, writer, number, name, name, value))
        yield msgspec.json.encode((0, 0, number, "rank/1", name, value))
        yield from (group.encode(name, value).encode() for group in GROUPS[1:])


STORE = Target("store", _run, (RendezvousError,), _seeds, mutate_json)
