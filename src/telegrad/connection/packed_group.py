"""The records of a large group as one piece of bytes, of which only those are decoded that somebody looks for.

A worker of ten thousand calls few of them. So the list that it gets at rendezvous stays as it is: compressed *pages* of
records by id, an *index* from names to ids, and *samples*. The samples stand for all where a worker has to know whether
it can be in a group with the others: members of one *kind* differ in nothing that matters for this, except that they
are on its own host or not. So of each kind there are a few from each of two hosts.

Whoever wrote the list had the group's token, and may still lie. But every member checks what the list says of itself
(`confirm`): its record, that it is found by its name, and that a sample stands for it. And all agree on the digest. So
in a group that was formed, each record is as its own worker has seen it, although no worker has looked at all of them.
"""

from __future__ import annotations

import hashlib
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import overload

import msgspec

from telegrad.connection.routes import Kind, kind_of
from telegrad.connection.worker_record import MAX_ID, WorkerRecord, check_record
from telegrad.errors import RendezvousError

PAGE = 32
"""Records in a page: so many are decompressed to look at one."""
_RECENT = 64  # records that stay decoded
_PAGE_LIMIT = PAGE * 64 * 1024  # bytes of a page
_HOSTS = 2  # of each kind: one of them is not that of the worker that looks
_PER_HOST = 3  # two workers that cannot connect to each other need a third one
_MAX_SAMPLES = 4096
_ENTRY = 6  # bytes of the index for each worker: the checksum of its name, and its id


class _Pieces(msgspec.Struct, frozen=True):
    """What the bytes contain."""

    size: int
    pages: tuple[bytes, ...]
    index: bytes
    samples: tuple[int, ...]


def digest_of(data: bytes) -> str:
    """Return the digest of a packed group."""
    return hashlib.sha256(data).hexdigest()


def pack(records: Sequence[WorkerRecord]) -> bytes:
    """Return the records of workers 0 to n - 1, for `PackedGroup`."""
    if any(record.id != place for place, record in enumerate(records)):
        raise ValueError("the ids of a packed group are 0 to n - 1")
    pages = [zlib.compress(msgspec.msgpack.encode(records[i : i + PAGE])) for i in range(0, len(records), PAGE)]
    index = b"".join(sorted(_checksum(record.name) + record.id.to_bytes(2) for record in records))
    return msgspec.msgpack.encode(_Pieces(len(records), tuple(pages), index, tuple(_sampled(records))))


def _sampled(records: Sequence[WorkerRecord]) -> Iterator[int]:
    seen: dict[Kind, dict[str, int]] = {}
    for record in records:
        hosts = seen.setdefault(kind_of(record), {})
        count = hosts.get(record.host, 0)
        if count < _PER_HOST and (count or len(hosts) < _HOSTS):
            hosts[record.host] = count + 1
            yield record.id


class PackedGroup(Sequence[WorkerRecord]):
    """The records of workers 0 to n - 1. Raises RendezvousError for what cannot be decoded, when it is looked at."""

    def __init__(self, data: bytes, digest: str = "") -> None:
        """`digest` is that of the data, if it is known."""
        self.digest = digest or digest_of(data)
        """Equal for two workers only if they have the same list."""
        try:
            pieces = msgspec.msgpack.decode(data, type=_Pieces)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RendezvousError(f"cannot read the list of all workers: {error}") from error
        size = self._size = pieces.size
        if not 0 < size <= MAX_ID + 1 or len(pieces.pages) != -(-size // PAGE) or len(pieces.index) != size * _ENTRY:
            raise RendezvousError("the list of all workers is malformed")
        if not 0 < len(pieces.samples) <= _MAX_SAMPLES or not all(0 <= place < size for place in pieces.samples):
            raise RendezvousError("the list of all workers has invalid samples")
        self._pieces = pieces
        self._last: tuple[int, list[msgspec.Raw]] = -1, []  # the page that was decompressed last
        self._recent: dict[int, WorkerRecord] = {}  # several parts of a worker look for the same one

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedGroup):
            return self.digest == other.digest
        return list(self) == list(other) if isinstance(other, list) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> WorkerRecord: ...
    @overload
    def __getitem__(self, place: slice) -> list[WorkerRecord]: ...
    def __getitem__(self, place: int | slice) -> WorkerRecord | list[WorkerRecord]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(self._size))]
        if not 0 <= place < self._size:
            raise IndexError(place)
        record = self._recent.get(place)
        if record is None:
            number, page = self._last
            if number != place // PAGE:
                number = place // PAGE
                page = self._decompress(number)
                self._last = number, page
            record = _checked(page[place % PAGE], place)
            if len(self._recent) >= _RECENT:
                self._recent = {}
            self._recent[place] = record
        return record

    def _decompress(self, number: int) -> list[msgspec.Raw]:
        try:
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(self._pieces.pages[number], _PAGE_LIMIT)
            if unpacker.unconsumed_tail or not unpacker.eof:
                raise RendezvousError("the list of all workers is too long, or was cut off")
            page = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
        except (zlib.error, msgspec.DecodeError, RecursionError) as error:
            raise RendezvousError(f"cannot read the list of all workers: {error}") from error
        if len(page) != min(PAGE, self._size - number * PAGE):
            raise RendezvousError(f"the list of all workers has a page of {len(page)}")
        return page

    def place_of(self, name: str) -> int:
        """Return the id of the worker with this name; -1 if there is none."""
        index, checksum = self._pieces.index, _checksum(name)
        first = bisect_left(range(self._size), checksum, key=lambda entry: index[entry * _ENTRY : entry * _ENTRY + 4])
        for start in range(first * _ENTRY, self._size * _ENTRY, _ENTRY):
            if index[start : start + 4] != checksum:
                break
            place = int.from_bytes(index[start + 4 : start + _ENTRY])
            if place < self._size and self[place].name == name:
                return place
        return -1

    def find(self, name: str) -> WorkerRecord | None:
        """Return the record of the worker with this name."""
        place = self.place_of(name)
        return None if place < 0 else self[place]

    @cached_property
    def samples(self) -> list[WorkerRecord]:
        """Records that stand for all, by id."""
        return [self[place] for place in sorted(set(self._pieces.samples))]

    def confirm(self, mine: WorkerRecord) -> bool:
        """Return whether the list says of a worker what it says of itself."""
        if mine.id >= self._size or self[mine.id] != mine or self.place_of(mine.name) != mine.id:
            return False
        if mine in self.samples:
            return True
        hosts = [sample.host for sample in self.samples if kind_of(sample) == kind_of(mine)]
        return hosts.count(mine.host) >= _PER_HOST or len(set(hosts) - {mine.host}) >= _HOSTS


def _checked(data: msgspec.Raw, place: int) -> WorkerRecord:
    try:
        record = msgspec.msgpack.decode(data, type=WorkerRecord)
        check_record(record)
        if record.id != place:
            raise ValueError(f"it belongs to rank {record.id}")
    except (ValueError, RecursionError) as error:  # including msgspec's
        raise RendezvousError(f"the record of rank {place} is invalid: {error}") from error
    return record


def representatives(group: Sequence[WorkerRecord]) -> Sequence[WorkerRecord]:
    """Return workers with whom a worker can be in a group only if it can be with all."""
    return group.samples if isinstance(group, PackedGroup) else group


def find_in(group: Sequence[WorkerRecord], name: str) -> WorkerRecord | None:
    """Return the record of the worker with this name."""
    if isinstance(group, PackedGroup):
        return group.find(name)
    return next((record for record in group if record.name == name), None)


def _checksum(name: str) -> bytes:
    return zlib.crc32(name.encode()).to_bytes(4)
