"""The list of all workers of a new group: who writes it, what is read, and how often the store is asked."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, Store

from telegrad import rendezvous_roster
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.packed_group import digest_of, pack
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import RendezvousError, UnauthenticatedRecord
from telegrad.rendezvous import assemble
from telegrad.rendezvous_records import Records
from telegrad.rendezvous_roster import BLOCK, Roster, absent, completes, has_roster, read_roster, write_roster

KEYS = derive_keys(b"the token of this group")


def record(rank: int) -> WorkerRecord:
    return WorkerRecord(f"w{rank}", rank, 100 + rank, (f"tcp://10.0.0.1:{rank + 1}",))


def group(size: int) -> list[WorkerRecord]:
    return [record(rank) for rank in range(size)]


def key(rank: int) -> str:
    return f"rank/{rank}"


@given(st.integers(1, 3 * BLOCK + 1), st.randoms(use_true_random=False))
def test_only_the_last_worker_finds_all_entries(size: int, random: Any) -> None:
    store, ranks = HashStore(), list(range(size))
    random.shuffle(ranks)
    found = []
    for rank in ranks:
        store.set(key(rank), "x")
        found.append(completes(store, key, rank, size))
    assert found == [False] * (size - 1) + [True]


@given(st.integers(1, 3 * BLOCK), st.data())
def test_absent_ranks_are_found(size: int, data: st.DataObject) -> None:
    missing = data.draw(st.sets(st.integers(0, size - 1)))
    store = HashStore()
    for rank in set(range(size)) - missing:
        store.set(key(rank), "x")
    assert absent(store, key, range(size)) == sorted(missing)


def test_a_list_is_read_as_it_was_written_and_the_first_one_holds() -> None:
    store = HashStore()
    assert not has_roster(store)
    write_roster(store, Records(KEYS, store), group(3))
    write_roster(store, Records(KEYS, store), group(2))
    assert has_roster(store)
    assert list(read_roster(store, Records(KEYS, store), 3)) == group(3)


def put(store: Store, data: bytes, digest: str) -> None:
    head = Records(KEYS, store).encode("roster", Roster(digest)).encode()
    store.set("roster", head + b"\n" + data)  # type: ignore[arg-type]  # torch takes bytes, too


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"not msgpack", "cannot read the list of all workers"),
        (pack(group(3)), "has 3, not 2"),
        (pack(group(2))[:-9], "cannot read the list of all workers"),
        (b"x" * 8_000_001, "more than 8000000 bytes"),
    ],
    ids=["garbage", "more", "less", "long"],
)
def test_a_malformed_list_is_an_error(data: bytes, reason: str) -> None:
    store = HashStore()
    put(store, data, digest_of(data))
    with pytest.raises(RendezvousError, match=reason):
        read_roster(store, Records(KEYS, store), 2)


@given(st.integers(0, len(pack(group(40))) - 1), st.integers(1, 255))
def test_no_change_of_a_list_is_accepted(place: int, change: int) -> None:
    store, data = HashStore(), pack(group(40))
    put(store, data[:place] + bytes([data[place] ^ change]) + data[place + 1 :], digest_of(data))
    with pytest.raises(UnauthenticatedRecord, match="was changed by somebody who does not have the token"):
        read_roster(store, Records(KEYS, store), 40)


def test_a_list_that_does_not_fit_into_the_store_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_roster, "_MAX_PACKED", 100)
    store = HashStore()
    with pytest.raises(RendezvousError, match="the list of all workers would have more than 100 bytes"):
        write_roster(store, Records(KEYS, store), group(40))
    assert not has_roster(store)


def test_a_list_without_the_token_is_not_believed() -> None:
    store = HashStore()
    write_roster(store, Records(None, store), group(2))
    with pytest.raises(UnauthenticatedRecord):
        read_roster(store, Records(KEYS, store), 2)


class CountingStore:
    """A store that counts the entries that one worker names."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.named: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(keys: Any, *rest: Any) -> Any:
            self.named[name] += len(keys) if isinstance(keys, list) else 1
            return getattr(self._store, name)(keys, *rest)

        return call


def test_a_worker_reads_as_many_entries_in_a_large_group_as_in_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_roster, "BLOCK", 4)

    def entries_read(size: int) -> list[int]:
        shared, stores = HashStore(), []
        threads = []
        for rank in range(size):
            store: Any = CountingStore(shared)
            stores.append(store)
            threads.append(threading.Thread(target=assemble, args=(store, record(rank), KEYS, size, 60.0)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(store.named["multi_get"] + store.named["get"] for store in stores)

    small, large = entries_read(8), entries_read(48)
    assert small[4] == large[24] == 2, "the list and the outcome"
    assert sum(large) <= 48 * 2 + 3 * 2 * 48, "few workers read all entries"
