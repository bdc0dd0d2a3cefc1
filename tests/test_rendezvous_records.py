"""Entries of the rendezvous store are authenticated, and a hostile store can only prevent a group from forming."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.stores import tcp_server
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from telegrad.connection.group_keys import GroupKeys, derive_keys
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError, RendezvousError, UnauthenticatedRecord
from telegrad.rendezvous import assemble
from telegrad.rendezvous_records import (
    MAX_RECORD,
    Epoch,
    Outcome,
    Records,
    Registration,
    check_epoch,
    describe_store,
)
from telegrad.rendezvous_roster import write_roster
from telegrad.wire.frames import VERSION

KEYS, OTHERS = derive_keys(b"the token of this group"), derive_keys(b"the token of another group")
SHORT = 1.0
"""Long enough for a group that forms, short enough to wait for one that does not."""


def record(rank: int, incarnation: int = 0) -> WorkerRecord:
    return WorkerRecord(f"w{rank}", rank, incarnation or 100 + rank, (f"tcp://10.0.0.{rank + 1}:1",))


class HostileStore:
    """A store that changes what workers read. It behaves like a store otherwise."""

    def __init__(self, store: Store, change: Callable[[str, bytes], bytes]) -> None:
        self._store = store
        self._change = change

    def get(self, key: str) -> bytes:
        return self._change(key, self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._change(key, self._store.compare_set(key, expected, value))

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


def meet(
    store: Store, keys: tuple[GroupKeys | None, ...] = (KEYS, KEYS), *, hostile: HostileStore | None = None
) -> list[list[WorkerRecord] | RendezvousError]:
    """Let workers with these keys meet, of which worker 0 sees the store through `hostile`."""
    found: dict[int, list[WorkerRecord] | RendezvousError] = {}

    def run(rank: int) -> None:
        mine: Any = store if hostile is None or rank else hostile
        try:
            found[rank] = list(assemble(mine, record(rank), keys[rank], len(keys), SHORT))
        except RendezvousError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(keys))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(keys))]


def entries(store: Store) -> dict[str, bytes]:
    keys = ["first", "name/w0", "name/w1", "rank/0", "rank/1", "confirmed/0", "confirmed/1", "outcome"]
    return {key: store.get(key) for key in keys if store.check([key])}


# -- tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [(KEYS, KEYS), (None, None)])
def test_workers_with_the_same_token_meet(keys: tuple[GroupKeys | None, GroupKeys | None]) -> None:
    assert meet(HashStore(), keys) == [[record(0), record(1)]] * 2


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ((KEYS, OTHERS), "was not written with the token of this group"),
        ((KEYS, None), "a group token"),
        ((None, KEYS), "a group token"),
    ],
)
def test_workers_with_different_tokens_learn_it_at_once(
    keys: tuple[GroupKeys | None, GroupKeys | None], reason: str
) -> None:
    for error in meet(HashStore(), keys):
        assert isinstance(error, UnauthenticatedRecord)
        assert isinstance(error, AuthenticationError)
        assert "Start every worker with the same TELEGRAD_TOKEN" in str(error)
        assert not isinstance(error.__context__, UnauthenticatedRecord)  # or a traceback would say it twice
    assert any(reason in str(error) for error in meet(HashStore(), keys))


# -- what a hostile store can do ------------------------------------------------------------------------------


def rewrite_address(key: str, value: bytes) -> bytes:
    return value.replace(b"10.0.0.2:1", b"10.6.6.6:6")


@pytest.mark.parametrize("entry", ["rank/1", "roster"])
def test_a_changed_entry_is_not_believed(entry: str) -> None:
    def change(key: str, value: bytes) -> bytes:
        return rewrite_address(key, value).replace(b'{"digest":"', b'{"digest": "') if key == entry else value

    store = HashStore()
    # Worker 0 comes last, so it reads the entries of all.
    other = threading.Thread(target=lambda: meet_alone(store, 1))
    other.start()
    store.wait(["rank/1"])
    error = meet_alone(HostileStore(store, change), 0)
    other.join()
    assert isinstance(error, UnauthenticatedRecord)
    claim = " (it says: by worker 'w1'" if entry == "rank/1" else ""
    assert f"was not written with the token of this group{claim}" in str(error)


def meet_alone(store: Any, rank: int) -> list[WorkerRecord] | RendezvousError:
    try:
        return list(assemble(store, record(rank), KEYS, 2, SHORT))
    except RendezvousError as error:
        return error


def test_an_entry_cannot_be_moved_to_another_name() -> None:
    # One record for two ranks, two records exchanged, and a record as an outcome.
    store = HashStore()
    meet(store)
    seen = entries(store)
    records = Records(KEYS, store)
    for name, kind in (("rank/0", Registration), ("rank/1", Registration), ("outcome", Outcome)):
        records.decode(name, seen[name], kind, "it")
        for other in seen.keys() - {name}:
            with pytest.raises(UnauthenticatedRecord):
                records.decode(name, seen[other], kind, "it")


def test_records_of_an_earlier_group_do_not_form_a_group() -> None:
    # The attacker kept everything of an earlier group with this token, and gives it to a worker that starts again.
    earlier = HashStore()
    assert meet(earlier) == [[record(0), record(1)]] * 2
    old = entries(earlier)
    restarted = record(1, incarnation=999)
    for repeated in (
        ["rank/0"],
        ["rank/0", "confirmed/0"],
        ["rank/0", "confirmed/0", "outcome"],
        ["rank/0", "confirmed/0", "confirmed/1", "outcome"],
        ["rank/0", "outcome"],
        ["outcome"],
        [*old.keys()],
    ):
        store = HashStore()
        for name in repeated:
            store.set(name, old[name])  # type: ignore[arg-type]  # bytes, of the list
        with pytest.raises(RendezvousError):
            assemble(store, restarted, KEYS, 2, 0.1)


def roster(store: Store, *registrations: Registration) -> bytes:
    """Return an authentic list of these workers."""
    other = HashStore()
    write_roster(other, Records(KEYS, store), [each.record for each in registrations])
    return other.get("roster")


def registration(rank: int, incarnation: int | None = None) -> Registration:
    mine = record(rank) if incarnation is None else record(rank, incarnation=incarnation)
    return Registration(mine, 2, os.getpid(), socket.gethostname())


def test_a_worker_notices_that_its_own_record_was_replaced() -> None:
    store = HashStore()
    older = roster(store, registration(0, incarnation=7), registration(1))
    hostile = HostileStore(store, lambda key, value: older if key == "roster" else value)
    first, _ = meet(store, hostile=hostile)
    assert isinstance(first, UnauthenticatedRecord)
    assert "the record of worker 'w0' (rank 0) in the rendezvous store was replaced" in str(first)


def test_a_store_that_shows_different_records_to_different_workers_is_noticed() -> None:
    # Worker 0 sees a list with an older record of worker 1, which is authentic.
    store = HashStore()
    older = roster(store, registration(0), registration(1, incarnation=5))
    hostile = HostileStore(store, lambda key, value: older if key == "roster" else value)
    first, second = meet(store, hostile=hostile)
    for error in (first, second):
        assert isinstance(error, RendezvousError)
    assert "found different records" in f"{first}{second}"


def test_an_outcome_of_other_records_is_not_believed() -> None:
    store = HashStore()
    other = Records(KEYS, store).encode("outcome", Outcome("complete", digest="of another group")).encode()
    first, _ = meet(store, hostile=HostileStore(store, lambda key, value: other if key == "outcome" else value))
    assert isinstance(first, UnauthenticatedRecord)
    assert "worker 'w0' (rank 0) and the others found different records" in str(first)


@pytest.mark.parametrize("missing", ["rank/0", "confirmed/0"])
def test_a_deleted_entry_ends_the_rendezvous_without_blocking(missing: str) -> None:
    class Deleting(HostileStore):
        looks = 0

        def check(self, keys: list[str]) -> bool:
            if missing not in keys:
                return super().check(keys)
            self.looks += 1
            return self.looks == 1  # it is there, and then it is not

    store = HashStore()
    store.set("rank/0", Records(KEYS, store).encode("rank/0", registration(0)))
    with pytest.raises(UnauthenticatedRecord, match="entries are missing"):
        assemble(Deleting(store, lambda key, value: value), record(1), KEYS, 2, 5.0)  # type: ignore[arg-type]


@given(
    data=st.binary(max_size=200), name=st.sampled_from(["first", "name/w1", "rank/0", "rank/1", "roster", "outcome"])
)
def test_garbage_in_the_store_raises_only_rendezvous_errors(data: bytes, name: str) -> None:
    for keys in (KEYS, None):
        store = HashStore()
        hostile: Any = HostileStore(store, lambda key, value: data if key == name else value)
        store.set("rank/0", "x")
        with pytest.raises(RendezvousError) as caught:
            assemble(hostile, record(1), keys, 2, 0.05)
        assert str(caught.value).isprintable()


@given(data=st.data())
def test_no_change_of_an_entry_is_accepted(data: st.DataObject) -> None:
    records = Records(KEYS, HashStore())
    text = records.encode("rank/0", Registration(record(0), 2, 1, "elsewhere")).encode()
    place = data.draw(st.integers(0, len(text) - 1))
    changed = (
        text[:place]
        + data.draw(st.binary(max_size=2).filter(lambda b: b != text[place : place + 1]))
        + text[place + 1 :]
    )
    with pytest.raises(RendezvousError):
        records.decode("rank/0", changed, Registration, "it")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group": -1}, "an invalid group -1"),
        ({"number": 2**63}, "an invalid number 9223372036854775808"),
        ({"world_size": -1}, "an invalid size -1"),
        ({"world_size": 2**40}, "an invalid size 1099511627776"),
        ({"members": ((0, 0), (0, 0))}, "lists a worker twice"),
        ({"members": ((0, -1),)}, "the record of rank 0 is invalid: invalid generation -1"),
    ],
)
def test_an_epoch_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    members = [
        Registration(msgspec.structs.replace(record(rank), generation=generation), 0, 1, "")
        for rank, generation in changes.pop("members", ())
    ]
    epoch = msgspec.structs.replace(Epoch(1, 7, 0, tuple(members)), **changes)
    with pytest.raises(RendezvousError, match=reason):
        check_epoch(epoch)


def test_a_huge_entry_is_not_parsed() -> None:
    records = Records(KEYS, HashStore())
    with pytest.raises(RendezvousError, match=f"more than {MAX_RECORD} bytes"):
        records.decode("outcome", b"x" * 10_000_000, Outcome, "the outcome")
    with pytest.raises(RendezvousError, match=f"would have more than {MAX_RECORD} bytes"):
        records.encode("outcome", Outcome("error", "x" * MAX_RECORD))


def test_a_claimed_author_cannot_forge_a_line() -> None:
    forged = Registration(record(0), 2, 1, "elsewhere\nERROR all is lost")
    data = Records(OTHERS, HashStore()).encode("rank/0", forged).encode()
    with pytest.raises(UnauthenticatedRecord) as caught:
        Records(KEYS, HashStore()).decode("rank/0", data, Registration, "it")
    assert str(caught.value).isprintable()


def test_other_versions_are_named() -> None:
    data = f"{VERSION + 1} - {{}}".encode()
    with pytest.raises(RendezvousError, match=f"version {VERSION + 1}, but this worker speaks {VERSION}: install the"):
        Records(KEYS, HashStore()).decode("rank/0", data, Registration, "the record of rank 0")


def test_errors_say_where_the_store_is(tmp_path: Path) -> None:
    server = tcp_server()
    assert describe_store(PrefixStore("x", server)) == f"at 127.0.0.1:{server.port}"
    assert describe_store(FileStore(str(tmp_path / "store"), 1)) == f"in the file {tmp_path}/store"
    assert describe_store(HashStore()) == "of this process"
