"""Workers are made when they are looked for, and then they are the same as if all had been made."""

from __future__ import annotations

import pytest

from telegrad.connection.packed_group import PackedGroup, pack
from telegrad.connection.peer_table import PeerTable
from telegrad.connection.worker_record import WorkerRecord

RECORDS = [WorkerRecord(f"w{rank}", rank, 100 + rank, (f"tcp://10.0.0.1:{rank + 1}",)) for rank in range(100)]


@pytest.fixture(params=["packed", "listed"])
def table(request: pytest.FixtureRequest) -> PeerTable:
    table = PeerTable()
    assert table.all() == []
    table.fill(PackedGroup(pack(RECORDS)) if request.param == "packed" else RECORDS)
    return table


@pytest.fixture(params=[False, True], ids=["", "listed-before"])
def listed_before(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def packed() -> PeerTable:
    table = PeerTable()
    table.fill(PackedGroup(pack(RECORDS)))
    return table


def test_workers_are_found_by_name_id_and_place(table: PeerTable) -> None:
    assert len(table) == 100
    for rank in (7, 99, 0):
        peer = table.get(f"w{rank}")
        assert peer is not None
        assert peer.record == RECORDS[rank]
        assert table.get(rank) is table.at(rank) is table.next(rank) is peer
        assert table.place_of(rank) == rank
        assert not table.is_gone(rank)
    assert [table.get(to) for to in ("nobody", "", -1, 100)] == [None] * 4
    assert table.next(100) is None
    assert [peer.record for peer in table.all()] == RECORDS
    assert table.all() is table.all()
    assert table.get("w50") is table.all()[50]


def test_places_are_those_of_the_workers_that_exist() -> None:
    table = PeerTable()
    table.fill(RECORDS[10:20:3])
    assert [table.place_of(worker) for worker in (0, 10, 11, 13, 19, 20)] == [0, 0, 1, 1, 3, 4]
    following = table.next(11)
    assert following is table.at(1)
    assert following is not None
    assert following.record.id == 13


def test_only_those_that_were_looked_for_are_used() -> None:
    table = packed()
    assert table.used() == []
    first, second = table.get("w3"), table.at(90)
    assert table.used() == [first, second]
    assert len(table) == 100
    assert {RECORDS[0], RECORDS[3], RECORDS[90]} <= set(table.samples())
    assert len(table.samples()) < 10
    everybody = table.all()
    assert table.used() == [first, second]
    assert (everybody[3], everybody[90]) == (first, second)
    table.use(everybody[50])
    assert table.used() == [first, second, everybody[50]]
    assert table.get("w50") is everybody[50]
    assert table.get("w51") is everybody[51]


def test_a_replacement_takes_the_place_of_a_worker_that_was_not_used(listed_before: bool) -> None:
    table = packed()
    before = table.all() if listed_before else []
    later = WorkerRecord("w5", 5, 999, (), generation=1)
    peer = table.add(later)
    for earlier in before[5:6]:
        table.use(earlier)  # by a thread that has listed all before
    assert table.get("w5") is table.get(5) is table.at(5) is peer
    assert [each.record for each in table.all()] == [*RECORDS[:5], later, *RECORDS[6:]]
    assert [one for one in before if one not in table.all()] == before[5:6], "the others are the same objects"


def test_workers_that_are_looked_for_after_all_have_left_are_gone(listed_before: bool) -> None:
    table = packed()
    if listed_before:
        table.all()
    known = table.at(1)
    table.leave_others("it was shut down")
    assert not table.is_gone(1)
    assert not known.gone
    assert table.is_gone(2)
    other = table.at(2)
    assert (other.gone, other.left) == ("it was shut down", True)
    assert all(peer.gone for peer in table.all() if peer is not known)
    known.gone = "lost"
    assert table.is_gone(1)
