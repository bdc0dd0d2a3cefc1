"""The identity and addresses of a worker, as exchanged at rendezvous.

The rendezvous store is not trusted. Records are plain data, those of a group with a token are authenticated, and a
worker still has to prove its identity in the handshake.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from telegrad.transport.addresses import parse_address

_NAME = re.compile(r"[0-9A-Za-z_:-]+\Z")
MAX_NAME = 127
AWAIT_VARIABLE = "TELEGRAD_AWAITED_REPLACEMENT"
"""Set by launchers that start dead workers again; see `telegrad.settings.AgentSettings.awaited_replacement`."""
MAX_ID = 0xFFFF
MAX_GENERATION = 2**63 - 1
_MAX_DEVICE_TYPES = 32
_MAX_DEVICE_NAME = 64
_MODES = {"any": "any function (accept='any')", "registered": "only exposed functions (accept='registered')"}


class WorkerRecord(msgspec.Struct, frozen=True):
    """One incarnation of a worker."""

    name: str
    id: int
    incarnation: int
    """A random 64-bit number that changes when the worker is restarted."""
    addresses: tuple[str, ...]
    """Where the worker listens, best first: ``unix:///path``, ``tcp://host:port``, ``memory://name``."""
    host: str = ""
    """Equal on two workers only if they can reach each other's unix sockets."""
    main: str = ""
    """Identifies the program that runs as ``__main__``. Its functions are sent by name to workers that run the same."""
    tls: bool = False
    """Whether the worker encrypts tcp connections."""
    accept: str = "any"
    """Which calls the worker accepts, and so how values travel; see `telegrad.settings.AgentSettings.accept`."""
    generation: int = 0
    """How often the worker was replaced, or a number that grows as fast; see `telegrad.protocol.membership`."""
    devices: tuple[tuple[str, int], ...] = ()
    """The worker's accelerators: types, and how many there are of each."""


class FoundGroup(NamedTuple):
    """The group that a worker has found at rendezvous."""

    records: Sequence[WorkerRecord]
    """The records of all members, in a new group including this worker's."""
    exists: bool = False
    """Whether the group was formed before this worker came, which has to join it then."""
    is_open: bool = False
    """Whether workers with other names may join later."""
    generation: int = -1
    """That of this worker, if it takes the place of one that has left an open group in order; -1 otherwise."""


def check_name(name: str) -> str:
    """Return `name` if it is a valid worker name, else raise a ValueError that states the rule."""
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > MAX_NAME:
        raise ValueError(f"invalid worker name {name!r}: use 1 to {MAX_NAME} letters, digits, '_', ':' and '-'")
    return name


def check_id(worker_id: int) -> int:
    """Return `worker_id` if it is a valid worker id (it must fit in 16 bits), else raise a ValueError."""
    if not 0 <= worker_id <= MAX_ID:
        raise ValueError(f"invalid worker id {worker_id}: ids are 0 to {MAX_ID}")
    return worker_id


def check_generation(generation: int) -> int:
    """Return `generation` if it is a valid generation, else raise a ValueError."""
    if not 0 <= generation <= MAX_GENERATION:
        raise ValueError(f"invalid generation {generation}: generations are 0 to {MAX_GENERATION}")
    return generation


def check_record(record: WorkerRecord) -> None:
    """Raise a ValueError if this cannot be the record of a worker. Others announce whatever they like."""
    check_name(record.name)
    check_id(record.id)
    if not 0 <= record.incarnation < 2**64:
        raise ValueError(f"incarnation {record.incarnation} does not fit in 64 bits")
    check_generation(record.generation)
    for address in record.addresses:
        parse_address(address)
    if len(record.devices) > _MAX_DEVICE_TYPES:
        raise ValueError(f"{len(record.devices)} types of devices; the limit is {_MAX_DEVICE_TYPES}")
    for kind, count in record.devices:
        if not kind.isidentifier() or len(kind) > _MAX_DEVICE_NAME or not 0 <= count <= MAX_ID:
            raise ValueError(f"{count} devices of the type {kind[:_MAX_DEVICE_NAME]!r}, which cannot be")


def modes_differ(me: WorkerRecord, other: str, accept: str) -> str:
    """Return the sentence for a worker whose group accepts other calls than this worker's."""
    return (
        f"worker {me.name!r} accepts {_MODES.get(me.accept, repr(me.accept))}, and worker {other!r} "
        f"{_MODES.get(accept, repr(accept))}: set Options(accept=...) or TELEGRAD_ACCEPT to the same on every worker"
    )
