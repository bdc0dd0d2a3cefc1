"""The packed list of a group: what is read is what was written, nothing else is decoded, and lies are noticed."""

from __future__ import annotations

import random
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from telegrad.connection import packed_group
from telegrad.connection.packed_group import PAGE, PackedGroup, digest_of, find_in, pack, representatives
from telegrad.connection.routes import kind_of, relays, ways
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import RendezvousError


def record(rank: int, **fields: Any) -> WorkerRecord:
    fields = {"addresses": (f"tcp://10.0.0.1:{rank % 60_000 + 1}",), "host": f"host{rank // 8}"} | fields
    return WorkerRecord(f"w{rank}", rank, 100 + rank, **fields)


def group(size: int) -> list[WorkerRecord]:
    return [record(rank) for rank in range(size)]


def pieces(size: int = 2 * PAGE) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(pack(group(size)))
    return found


def packed(fields: dict[str, Any]) -> PackedGroup:
    return PackedGroup(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 3])
def test_a_group_is_read_as_it_was_written(size: int) -> None:
    read = PackedGroup(pack(group(size)))
    assert list(read) == group(size) == read[:]
    assert read == group(size)
    assert read != (0,)
    assert {read, PackedGroup(pack(group(size)))} == {read}
    assert len(read) == size
    assert [read.find(one.name) for one in group(size)] == group(size)
    assert [find_in(each, "w0") for each in (read, group(size))] == [record(0)] * 2
    assert [find_in(each, "nobody") for each in (read, group(size))] == [None] * 2
    assert read.place_of("nobody") == -1
    for place in (-1, size):
        with pytest.raises(IndexError):
            read[place]


def test_a_worker_decodes_as_many_pages_in_a_large_group_as_in_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decompress = PackedGroup._decompress

    def count(self: PackedGroup, number: int) -> list[msgspec.Raw]:
        decoded.append(number)
        return decompress(self, number)

    monkeypatch.setattr(PackedGroup, "_decompress", count)
    for size in (4 * PAGE, 100 * PAGE):
        decoded.clear()
        read = PackedGroup(pack(group(size)))
        assert not decoded
        assert read.confirm(record(size - 1))
        assert read.find("w70") == record(70)
        assert len(decoded) <= 4


def test_workers_whose_names_have_the_same_checksum_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_group, "_checksum", lambda name: b"same")
    read = PackedGroup(pack(group(5)))
    assert [read.place_of(f"w{rank}") for rank in range(6)] == [0, 1, 2, 3, 4, -1]


def test_the_ids_of_a_packed_group_are_consecutive() -> None:
    with pytest.raises(ValueError, match="0 to n - 1"):
        pack([record(1)])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"size": 0}, "malformed"),
        ({"size": 2**16 + 1}, "malformed"),
        ({"pages": []}, "malformed"),
        ({"index": b""}, "malformed"),
        ({"samples": []}, "invalid samples"),
        ({"samples": [2 * PAGE]}, "invalid samples"),
        ({"samples": [0] * 5000}, "invalid samples"),
        ({"samples": "all"}, "cannot read"),
    ],
)
def test_malformed_bytes_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RendezvousError, match=reason):
        packed(pieces() | changes)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"not compressed", "cannot read"),
        (zlib.compress(b"not msgpack"), "cannot read"),
        (zlib.compress(b"x" * 10_000_000), "too long"),
        (zlib.compress(msgspec.msgpack.encode(group(PAGE)))[:-9], "cut off"),
        (zlib.compress(msgspec.msgpack.encode(group(PAGE - 1))), f"a page of {PAGE - 1}"),
        (zlib.compress(msgspec.msgpack.encode(group(PAGE)[::-1])), "record of rank 0 is invalid: it belongs to rank"),
        (zlib.compress(msgspec.msgpack.encode([record(0, addresses=("x",))] * PAGE)), "record of rank 0 is invalid"),
    ],
    ids=["raw", "garbage", "bomb", "less", "few", "order", "invalid"],
)
def test_a_malformed_page_is_an_error_when_it_is_looked_at(page: bytes, reason: str) -> None:
    fields = pieces()
    read = packed(fields | {"pages": [page, fields["pages"][1]]})
    assert read[PAGE] == record(PAGE)
    with pytest.raises(RendezvousError, match=reason):
        read[0]


@given(st.binary(max_size=400))
def test_garbage_raises_only_rendezvous_errors(data: bytes) -> None:
    with pytest.raises(RendezvousError):
        list(PackedGroup(data))


# -- what a list says of a worker -------------------------------------------------------------------------------


def test_every_worker_confirms_an_honest_list() -> None:
    read = PackedGroup(pack(group(100)))
    assert all(read.confirm(one) for one in group(100))
    assert read.digest == digest_of(pack(group(100)))


def test_a_worker_does_not_confirm_a_list_with_another_record_of_it() -> None:
    read = PackedGroup(pack([record(0), replace(record(1), incarnation=7)]))
    assert read.confirm(record(0))
    assert not read.confirm(record(1))
    assert not read.confirm(record(2))


def test_a_worker_does_not_confirm_a_list_in_which_its_name_is_not_found() -> None:
    fields = pieces()
    entries = [fields["index"][start : start + 6] for start in range(0, len(fields["index"]), 6)]
    hidden = [b"\xff" * 6 if entry.endswith((9).to_bytes(2)) else entry for entry in entries]
    read = packed(fields | {"index": b"".join(sorted(hidden))})
    assert [rank for rank in range(2 * PAGE) if not read.confirm(record(rank))] == [9]


def test_a_worker_does_not_confirm_a_list_in_which_no_sample_stands_for_it() -> None:
    other = record(2 * PAGE - 1, addresses=("unix:///x",))
    fields = msgspec.msgpack.decode(pack([*group(2 * PAGE - 1), other]))
    read = packed(fields | {"samples": [0, 1, 2]})
    refused = [one.id for one in [*group(2 * PAGE - 1), other] if not read.confirm(one)]
    assert refused == list(range(8, 2 * PAGE)), "those of other hosts, or of another kind"


# -- samples ----------------------------------------------------------------------------------------------------

ADDRESSES = [
    ("unix:///x",),
    ("unix:///x", "tcp://10.0.0.1:1"),
    ("tcp://10.0.0.1:1", "relay://4/1f2e3d4c5b6a7988"),
    ("tcp://[fd00::1]:1", "relay://6/1f2e3d4c5b6a7988"),
    ("tcp://10.0.0.1:1", "tcp://[fd00::1]:1", "relay://46/1f2e3d4c5b6a7988"),
    ("unix:///x", "relay://4/1f2e3d4c5b6a7988"),
    ("relay://6/1f2e3d4c5b6a7988",),
]


@given(st.integers(0, 2**32), st.integers(1, 25), st.integers(1, 4), st.integers(1, len(ADDRESSES)))
def test_samples_show_whatever_all_records_show(seed: int, size: int, hosts: int, kinds: int) -> None:
    chance = random.Random(seed)
    chosen = chance.sample(ADDRESSES, kinds)
    everybody = [
        record(rank, addresses=chance.choice(chosen), host=f"h{chance.randrange(hosts)}", tls=chance.random() < 0.9)
        for rank in range(size)
    ]
    read = PackedGroup(pack(everybody))
    samples = representatives(read)
    assert list(samples) == sorted(samples, key=lambda one: one.id)
    assert representatives(everybody) is everybody
    for me in everybody:
        assert read.confirm(me)
        assert _worst(me, everybody, everybody) == _worst(me, samples, samples)


def _worst(me: WorkerRecord, others: Any, all_: Any) -> set[Any]:
    """Return what a worker finds of the others: who cannot be reached, and how."""
    found: set[Any] = set()
    for one in others:
        if one.name == me.name:
            continue
        found.add(("tls", one.tls))
        way = [text.partition("://")[0] for text in ways(me, one)][:1]
        if way != ["unix"]:
            needs_relay = way == ["relay"]
            found.add((kind_of(one), *way, needs_relay and bool(relays(me, one, all_))))
    return found
