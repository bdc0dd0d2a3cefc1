"""Rendezvous through torch's stores: all workers get all records, or the same error."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.support.loaded_interpreter import LoadedPython
from tests.support.stores import reserved_port, tcp_client, tcp_server, together
from torch.distributed import DistStoreError, FileStore, HashStore, PrefixStore, Store

from telegrad import rendezvous, rendezvous_store
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.packed_group import digest_of, pack
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import DuplicateWorker, RendezvousError, RendezvousTimeout, StoreLost
from telegrad.rendezvous import _Rendezvous, assemble
from telegrad.rendezvous_records import MAX_RECORD, Confirmation, Records, Registration
from telegrad.wire.frames import VERSION

LONG = 60.0
"""A timeout that no test reaches."""
KEYS = derive_keys(b"the token of the group that meets here")

OpenStore = Callable[[], Store]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def record(rank: int, name: str | None = None, incarnation: int | None = None) -> WorkerRecord:
    return WorkerRecord(
        name=f"w{rank}" if name is None else name,
        id=rank,
        incarnation=2**64 - 1 - rank if incarnation is None else incarnation,
        addresses=(f"unix:///run/w{rank}.sock", f"tcp://[::1]:{1000 + rank}"),
        host="abc",
    )


@pytest.fixture(params=["hash", "file", "tcp", "prefix-hash", "prefix-file", "prefix-tcp"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Return a function that opens the same store again, as another worker would. TCP stores share two connections.

    Not more, because both ends of each do a reverse name lookup, which is slow without a name server.
    """
    kind = request.param.removeprefix("prefix-")
    if kind == "file":

        def plain() -> Store:
            return FileStore(str(tmp_path / "store"), -1)
    else:
        shared: list[Store] = [HashStore()]
        if kind == "tcp":
            server = tcp_server()
            shared = [server, tcp_client(server)]
        stores = itertools.cycle(shared)

        def plain() -> Store:
            return next(stores)

    return plain if kind == request.param else lambda: PrefixStore("group-1", plain())


def joining(store: Store, me: WorkerRecord, world_size: int, timeout: float = LONG) -> Callable[[], list[WorkerRecord]]:
    return lambda: list(assemble(store, me, KEYS, world_size, timeout))


def test_every_worker_gets_all_records_in_order_of_ids(connect: OpenStore) -> None:
    records = [record(rank) for rank in range(4)]
    before = threading.active_count()
    outcomes = together(*(joining(connect(), records[rank], 4) for rank in (2, 0, 3, 1)))
    assert outcomes == [records] * 4
    assert threading.active_count() == before


def test_nobody_returns_before_all_listen_in_a_group_that_needs_it(connect: OpenStore) -> None:
    listening: list[int] = []
    seen: dict[int, int] = {}

    def joins(rank: int) -> Callable[[], list[WorkerRecord]]:
        store = connect()

        def listen(records: Sequence[WorkerRecord]) -> None:
            assert [one.id for one in records] == [0, 1, 2]
            listening.append(rank)

        def join() -> list[WorkerRecord]:
            records = list(assemble(store, record(rank), KEYS, 3, LONG, listen))
            seen[rank] = len(listening)
            return records

        return join

    results = together(*(joins(rank) for rank in range(3)))
    assert all(isinstance(result, list) for result in results), results
    assert seen == {0: 3, 1: 3, 2: 3}


@pytest.mark.parametrize("kind", [RendezvousError, OSError])
def test_nobody_waits_for_a_worker_that_cannot_listen(
    connect: OpenStore, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "FAILURE_LINGER", 0.05)  # nobody's store ends with its process here
    stores = [connect(), connect()]

    def fails(records: Sequence[WorkerRecord]) -> None:
        raise kind("no port is free")

    def second() -> list[WorkerRecord]:
        with pytest.raises(kind, match=r"^no port is free$"):
            assemble(stores[1], record(1), KEYS, 2, LONG, fails)
        return []

    first, _ = together(lambda: assemble(stores[0], record(0), KEYS, 2, LONG), second)
    assert isinstance(first, RendezvousError)
    assert re.search(r"worker 'w1' \(rank 1\) failed in init_rpc: (OSError: )?no port is free", str(first))


def test_a_full_disk_is_an_error_with_the_path_and_a_remedy(tmp_path: Path) -> None:
    class FullStore(FileStore):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise DistStoreError("No space left on device")

    store = FullStore(str(tmp_path / "store"), 1)
    with pytest.raises(
        RendezvousError, match=rf"cannot write to the rendezvous store {tmp_path}/store: .*another file"
    ):
        assemble(store, record(0), KEYS, 1, LONG)


def test_a_group_of_one_is_complete(connect: OpenStore) -> None:
    assert list(assemble(connect(), record(0), KEYS, 1, LONG)) == [record(0)]


def test_a_duplicate_rank_is_an_error_that_names_both_workers(connect: OpenStore) -> None:
    outcomes = together(
        joining(connect(), record(0, "left"), 3),
        joining(connect(), record(0, "right", incarnation=5), 3),
        joining(connect(), record(1, "bystander"), 3),
    )
    for error in outcomes:
        assert isinstance(error, DuplicateWorker)
        for part in ("rank 0", "'left'", "'right'", f"pid {os.getpid()} on {socket.gethostname()}"):
            assert part in str(error)


def test_the_same_program_started_twice_is_a_duplicate_rank_not_a_duplicate_name() -> None:
    store = HashStore()
    outcomes = together(joining(store, record(1), 2), joining(store, record(1, incarnation=5), 2))
    for error in outcomes:
        assert isinstance(error, DuplicateWorker)
        assert "two workers have rank 1" in str(error)


def test_a_duplicate_rank_fails_alone_after_the_group_is_complete(connect: OpenStore) -> None:
    outcomes = together(*(joining(connect(), record(rank), 2) for rank in range(2)))
    assert outcomes == [[record(0), record(1)]] * 2
    for rank in range(2):
        with pytest.raises(
            DuplicateWorker, match=f"two workers have rank {rank}: worker 'w{rank}' .* and .*'late{rank}'"
        ):
            assemble(connect(), record(rank, f"late{rank}"), KEYS, 2, LONG)


def test_a_duplicate_name_is_an_error_for_every_worker(connect: OpenStore) -> None:
    outcomes = together(
        joining(connect(), record(0, "twin"), 4),
        joining(connect(), record(2, "twin"), 4),
        joining(connect(), record(1), 4),
    )
    for error in outcomes:
        assert isinstance(error, DuplicateWorker)
        for part in ("called 'twin'", "rank 0", "rank 2"):
            assert part in str(error)


def test_a_worker_that_waits_says_for_whom(
    connect: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous_store, "_FIRST_LOG", 0.05)
    together(*(joining(connect(), record(rank), 8, timeout=0.5) for rank in (0, 1, 3, 4, 6, 7)))
    lines = [one.getMessage() for one in caplog.records if "'w0'" in one.getMessage()]
    assert 2 <= len(lines) <= 4, "not ever more rarely"
    assert re.match(r"worker 'w0' \(rank 0\) has waited 0\.\d+ s for ranks 2, 5 of 8 workers", lines[-1])
    assert {one.levelname for one in caplog.records} == {"WARNING"}


def test_a_timeout_lists_missing_and_present_workers(connect: OpenStore) -> None:
    outcomes = together(*(joining(connect(), record(rank), 7, timeout=1.0) for rank in (0, 2)))
    for error in outcomes:
        assert isinstance(error, RendezvousTimeout)
        assert "5 of 7 workers did not join" in str(error)
        assert "ranks 1, 3-6." in str(error)
        assert "'w0' (rank 0), 'w2' (rank 2)" in str(error) or "'w2' (rank 2)." in str(error)


def test_a_worker_that_arrives_after_the_timeout_fails_immediately() -> None:
    store = HashStore()
    with pytest.raises(RendezvousTimeout):
        assemble(store, record(0), KEYS, 2, 0.05)
    with pytest.raises(RendezvousTimeout, match=r"rank 1\. Workers that joined: 'w0'"):
        assemble(store, record(1), KEYS, 2, LONG)


def test_many_missing_workers_make_a_short_error() -> None:
    store = HashStore()
    for rank in range(0, 200, 2):
        put_registration(store, record(rank), 200)
    with pytest.raises(RendezvousTimeout, match=r"and more\. Workers .* and 69 more") as caught:
        assemble(store, record(1), KEYS, 200, 0.05)
    assert len(str(caught.value)) < 2000


def test_different_world_sizes_fail_all_workers_without_waiting(connect: OpenStore) -> None:
    outcomes = together(joining(connect(), record(0), 3), joining(connect(), record(1), 5))
    for error in outcomes:
        assert type(error) is RendezvousError
        assert "started for 3 workers" in str(error) or "started for 5 workers" in str(error)
        assert "'w0'" in str(error)
        assert "'w1'" in str(error)


def test_an_invalid_worker_does_not_touch_the_store() -> None:
    store = HashStore()
    for bad in (record(2), record(0, "no spaces"), record(0, incarnation=2**64), record(0, "x" * MAX_RECORD)):
        with pytest.raises(RendezvousError):
            assemble(store, bad, KEYS, 2, LONG)
    with pytest.raises(RendezvousError, match="invalid world size 0"):
        assemble(store, record(0), KEYS, 0, LONG)
    assert store.num_keys() == 0


def put_registration(store: Store, record: WorkerRecord, world_size: int) -> None:
    key = f"rank/{record.id}"
    store.set(key, Records(KEYS, store).encode(key, Registration(record, world_size, 1, "elsewhere")))


def put_confirmation(store: Store) -> None:
    """Confirm as worker 1 that workers 0, which runs in this process, and 1 have registered."""
    digest = digest_of(pack([record(0), record(1)]))
    store.set("confirmed/1", Records(KEYS, store).encode("confirmed/1", Confirmation(digest)))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("not json", "cannot read"),
        (f"{VERSION} - []", "cannot read"),
        (f'{VERSION} - {{"record": null}}', "cannot read"),
        (f"{VERSION} - " + "[" * 10_000, "cannot read"),
        ("\x00", "cannot read"),
        ("x" * (MAX_RECORD + 257), f"more than {MAX_RECORD} bytes"),
        (f"{VERSION - 1} - {{}}", f"protocol version {VERSION - 1}, but this worker speaks {VERSION}"),
    ],
    ids=["text", "list", "null", "depth", "zero", "size", "version"],
)
def test_a_malformed_record_is_reported_with_its_rank(bad: str, reason: str) -> None:
    store = HashStore()
    store.set("rank/0", bad)
    with pytest.raises(RendezvousError, match=rf"(?=.*\brank 0 ).*{reason}"):
        assemble(store, record(1), None, 2, 5.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": 7}, "belongs to rank 7"),
        ({"name": "a b"}, "'a b'"),
        ({"incarnation": -1}, "does not fit in 64 bits"),
        ({"addresses": ("http://a:1",)}, "http://a:1"),
    ],
)
def test_an_invalid_record_is_reported_with_its_rank(change: dict[str, object], reason: str) -> None:
    store = HashStore()
    bad = Registration(msgspec.structs.replace(record(0), **change), 2, 1, "elsewhere")
    store.set("rank/0", Records(KEYS, store).encode("rank/0", bad))
    with pytest.raises(RendezvousError, match=f"rank 0 is invalid: .*{reason}"):
        assemble(store, record(1), KEYS, 2, LONG)


def test_a_malformed_outcome_is_an_error() -> None:
    store = HashStore()
    store.set("outcome", Records(KEYS, store).encode("outcome", {"status": "party"}))
    with pytest.raises(RendezvousError, match="cannot read the result of the rendezvous in the rendezvous store"):
        assemble(store, record(1), KEYS, 2, LONG)


def test_rank_0_waits_until_every_worker_has_signed_off() -> None:
    store = HashStore()
    put_registration(store, record(1), 2)
    put_confirmation(store)
    outcomes: list[list[WorkerRecord] | RendezvousError] = []
    host = threading.Thread(target=lambda: outcomes.extend(together(joining(store, record(0), 2))))
    host.start()
    store.wait(["left/0"])
    host.join(0.05)
    assert host.is_alive()
    store.set("left/1", "1")
    host.join()
    assert outcomes == [[record(0), record(1)]]


def test_rank_0_waits_for_dead_workers_only_until_the_timeout() -> None:
    store = HashStore()
    put_registration(store, record(1), 2)
    put_confirmation(store)
    assert list(assemble(store, record(0), KEYS, 2, 0.1)) == [record(0), record(1)]


def test_a_worker_that_ends_after_its_registration_fails_the_group_at_the_timeout() -> None:
    store = HashStore()
    put_registration(store, record(1), 2)
    with pytest.raises(RendezvousTimeout, match=r"all 2 workers registered, but some ended .*: rank 1\. Check"):
        assemble(store, record(0), KEYS, 2, 0.1)


def test_a_worker_that_ends_after_the_last_confirmation_does_not_fail_the_group() -> None:
    store = HashStore()
    assert together(*(joining(store, record(rank), 2) for rank in range(2))) == [[record(0), record(1)]] * 2
    store.delete_key("outcome")  # as if the worker that sets it had died before
    mine = Registration(record(1), 2, os.getpid(), socket.gethostname())
    _Rendezvous(store, mine, Records(KEYS, store), 0.0)._time_out()
    assert rendezvous.read_outcome(store, Records(KEYS, store)).status == "complete"


def test_a_worker_that_ends_before_it_lists_the_others_does_not_fail_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store, "_FIRST_LOG", 0.01)
    real = rendezvous.completes

    def completes(store: Store, key: Callable[[int], str], rank: int, size: int) -> bool:
        return key(0) != "rank/0" and real(store, key, rank, size)  # the one that finds all registrations has died

    monkeypatch.setattr(rendezvous, "completes", completes)
    store = HashStore()
    assert together(*(joining(store, record(rank), 2) for rank in range(2))) == [[record(0), record(1)]] * 2


def test_a_lost_store_is_an_error_that_names_its_host() -> None:
    server = tcp_server()
    client = tcp_client(server)
    outcomes: list[list[WorkerRecord] | RendezvousError] = []
    worker = threading.Thread(target=lambda: outcomes.extend(together(joining(client, record(1), 2))))
    worker.start()
    server.wait(["rank/1"])
    del server
    worker.join()
    (error,) = outcomes
    assert isinstance(error, StoreLost)
    assert "'w1' (rank 1) lost the rendezvous store" in str(error)


def test_a_duplicate_rank_in_a_file_store_hints_at_a_leftover_file(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assemble(PrefixStore("group", FileStore(path, -1)), record(0), KEYS, 1, LONG)
    with pytest.raises(DuplicateWorker, match="delete the rendezvous file"):
        assemble(PrefixStore("group", FileStore(path, -1)), record(0, incarnation=5), KEYS, 1, LONG)


def test_64_workers_meet_quickly_at_one_tcp_store() -> None:
    server = tcp_server()
    clients = [tcp_client(server) for _ in range(4)] * 16
    start = time.monotonic()
    outcomes = together(*(joining(client, record(rank), 64) for rank, client in enumerate(clients)))
    # Takes 0.15 s on two idle cores, even with 64 connections. The limit allows for a busy machine.
    assert time.monotonic() - start < 10
    assert outcomes == [[record(rank) for rank in range(64)]] * 64


PROGRAM = """
import os, sys
from telegrad.connection.worker_record import WorkerRecord
from telegrad.rendezvous import assemble
from telegrad.rendezvous_store import open_store
store, rank, world_size, *_ = open_store(None, -1, None, 60.0)
me = WorkerRecord(name=f"w{rank}", id=rank, incarnation=rank, addresses=())
found = assemble(store, me, None, world_size, 60.0)
print([worker.name for worker in found], flush=True)
os._exit(0)  # the most abrupt exit of rank 0
"""


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as number:
        yield number


def test_processes_find_each_other_even_if_rank_0_exits_immediately(port: int) -> None:
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    workers = [
        LoadedPython(
            [sys.executable, "-c", PROGRAM],
            env=environ | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    assert [worker.communicate()[0] for worker in workers] == ["['w0', 'w1', 'w2']\n"] * 3
