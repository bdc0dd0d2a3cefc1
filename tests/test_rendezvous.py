"""Workers find each other over torch's stores, or learn why they do not."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from telegrad import rendezvous
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import DuplicateWorker, RendezvousError, RendezvousTimeout
from telegrad.rendezvous import MAX_RECORD, Claim, assemble, open_store

LONG = 60.0
"""A timeout that no test waits for."""

OpenStore = Callable[[], Store]


def record(rank: int, name: str | None = None, incarnation: int | None = None) -> WorkerRecord:
    return WorkerRecord(
        name=f"w{rank}" if name is None else name,
        id=rank,
        incarnation=2**64 - 1 - rank if incarnation is None else incarnation,
        addresses=(f"unix:///run/w{rank}.sock", f"tcp://[::1]:{1000 + rank}"),
        host="abc",
    )


def tcp_server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


def tcp_client(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=10), wait_for_workers=False)


@pytest.fixture(params=["hash", "file", "tcp", "prefix-hash", "prefix-file", "prefix-tcp"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Opens the same store as another worker would; over TCP by one of two connections.

    Two, because both ends of each make libc look up the name of the other, which is slow where no name server answers.
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
        turns = itertools.cycle(shared)

        def plain() -> Store:
            return next(turns)

    return plain if kind == request.param else lambda: PrefixStore("group-1", plain())


def together(*workers: Callable[[], list[WorkerRecord]]) -> list[list[WorkerRecord] | RendezvousError]:
    """Run all at once, each in a thread; what one returned or raised is in its place."""
    outcomes: dict[int, list[WorkerRecord] | RendezvousError] = {}

    def run(index: int, worker: Callable[[], list[WorkerRecord]]) -> None:
        try:
            outcomes[index] = worker()
        except RendezvousError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[index] for index in range(len(workers))]


def joining(store: Store, me: WorkerRecord, world_size: int, timeout: float = LONG) -> Callable[[], list[WorkerRecord]]:
    return lambda: assemble(store, me, world_size, timeout)


# assemble


def test_everybody_gets_every_record_in_the_order_of_ids(connect: OpenStore) -> None:
    records = [record(rank) for rank in range(4)]
    before = threading.active_count()
    outcomes = together(*(joining(connect(), records[rank], 4) for rank in (2, 0, 3, 1)))
    assert outcomes == [records] * 4
    assert threading.active_count() == before


def test_a_group_of_one_needs_nobody(connect: OpenStore) -> None:
    assert assemble(connect(), record(0), 1, LONG) == [record(0)]


def test_two_workers_of_one_rank_are_both_told_of_both(connect: OpenStore) -> None:
    outcomes = together(
        joining(connect(), record(0, "left"), 3),
        joining(connect(), record(0, "right", incarnation=5), 3),
        joining(connect(), record(1, "bystander"), 3),
    )
    for error in outcomes:
        assert isinstance(error, DuplicateWorker)
        for part in ("rank 0", "'left'", "'right'", f"pid {os.getpid()} on {socket.gethostname()}"):
            assert part in str(error)


def test_the_same_program_started_twice_is_a_double_rank_and_not_a_double_name() -> None:
    store = HashStore()
    outcomes = together(joining(store, record(1), 2), joining(store, record(1, incarnation=5), 2))
    for error in outcomes:
        assert isinstance(error, DuplicateWorker)
        assert "two workers claim rank 1" in str(error)


def test_a_second_worker_of_a_rank_fails_alone_once_the_group_is_complete(connect: OpenStore) -> None:
    outcomes = together(*(joining(connect(), record(rank), 2) for rank in range(2)))
    assert outcomes == [[record(0), record(1)]] * 2
    for rank in range(2):
        with pytest.raises(
            DuplicateWorker, match=f"two workers claim rank {rank}: worker 'w{rank}' .* and .*'late{rank}'"
        ):
            assemble(connect(), record(rank, f"late{rank}"), 2, LONG)


def test_two_workers_of_one_name_are_told_to_everybody(connect: OpenStore) -> None:
    outcomes = together(
        joining(connect(), record(0, "twin"), 4),
        joining(connect(), record(2, "twin"), 4),
        joining(connect(), record(1), 4),
    )
    for error in outcomes:
        assert isinstance(error, DuplicateWorker)
        for part in ("called 'twin'", "rank 0", "rank 2"):
            assert part in str(error)


def test_who_never_came_and_who_did_is_listed(connect: OpenStore) -> None:
    outcomes = together(*(joining(connect(), record(rank), 7, timeout=1.0) for rank in (0, 2)))
    for error in outcomes:
        assert isinstance(error, RendezvousTimeout)
        assert "5 of 7 workers did not come" in str(error)
        assert "ranks 1, 3-6." in str(error)
        assert "'w0' (rank 0), 'w2' (rank 2)" in str(error) or "'w2' (rank 2)." in str(error)


def test_who_comes_after_the_others_gave_up_is_told_at_once() -> None:
    store = HashStore()
    with pytest.raises(RendezvousTimeout):
        assemble(store, record(0), 2, 0.05)
    with pytest.raises(RendezvousTimeout, match=r"rank 1\. Those that came: 'w0'"):
        assemble(store, record(1), 2, LONG)


def test_many_missing_workers_make_a_short_error() -> None:
    store = HashStore()
    for rank in range(0, 200, 2):
        put_claim(store, record(rank), 200)
    with pytest.raises(RendezvousTimeout, match=r"and more\. Those .* and 69 more") as caught:
        assemble(store, record(1), 200, 0.05)
    assert len(str(caught.value)) < 2000


def test_different_world_sizes_are_told_to_all_without_waiting(connect: OpenStore) -> None:
    outcomes = together(joining(connect(), record(0), 3), joining(connect(), record(1), 5))
    for error in outcomes:
        assert type(error) is RendezvousError
        assert "started for 3 workers" in str(error) or "started for 5 workers" in str(error)
        assert "'w0'" in str(error)
        assert "'w1'" in str(error)


def test_a_worker_that_cannot_be_in_the_group_does_not_touch_the_store() -> None:
    store = HashStore()
    for bad in (record(2), record(0, "no spaces"), record(0, incarnation=2**64), record(0, "x" * MAX_RECORD)):
        with pytest.raises(RendezvousError):
            assemble(store, bad, 2, LONG)
    with pytest.raises(RendezvousError, match="world size of 0"):
        assemble(store, record(0), 0, LONG)
    assert store.num_keys() == 0


def put_claim(store: Store, claimed: WorkerRecord, world_size: int) -> None:
    store.set(f"claim/{claimed.id}", rendezvous._encode(Claim(claimed, world_size, 1, "elsewhere")))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("not json", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"record": null}', "cannot be read"),
        ("\x00", "cannot be read"),
        ('"' + "x" * MAX_RECORD + '"', f"more than {MAX_RECORD} bytes"),
    ],
)
def test_a_record_that_is_no_record_is_reported_with_its_rank(bad: str, reason: str) -> None:
    store = HashStore()
    store.set("claim/0", bad)
    with pytest.raises(RendezvousError, match=f"rank 0 .*{reason}"):
        assemble(store, record(1), 2, LONG)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": 7}, "that of rank 7"),
        ({"name": "a b"}, "invalid worker name"),
        ({"incarnation": -1}, "does not fit in 64 bits"),
        ({"addresses": ("http://a:1",)}, "invalid address"),
    ],
)
def test_a_record_that_breaks_the_rules_is_reported_with_its_rank(change: dict[str, object], reason: str) -> None:
    values = {name: getattr(record(0), name) for name in WorkerRecord.__struct_fields__}
    store = HashStore()
    store.set("claim/0", rendezvous._encode(Claim(WorkerRecord(**(values | change)), 2, 1, "elsewhere")))
    with pytest.raises(RendezvousError, match=f"rank 0 is not valid: .*{reason}"):
        assemble(store, record(1), 2, LONG)


def test_a_verdict_that_cannot_be_read_is_an_error() -> None:
    store = HashStore()
    store.set("verdict", '{"outcome": "party"}')
    with pytest.raises(RendezvousError, match="verdict in the rendezvous store cannot be read"):
        assemble(store, record(1), 2, LONG)


def test_rank_0_stays_until_everybody_has_read_everything() -> None:
    store = HashStore()
    put_claim(store, record(1), 2)
    outcomes: list[list[WorkerRecord] | RendezvousError] = []
    host = threading.Thread(target=lambda: outcomes.extend(together(joining(store, record(0), 2))))
    host.start()
    store.wait(["left/0"])
    host.join(0.05)
    assert host.is_alive()
    store.set("left/1", "1")
    host.join()
    assert outcomes == [[record(0), record(1)]]


def test_rank_0_does_not_wait_for_the_dead_beyond_the_timeout() -> None:
    store = HashStore()
    put_claim(store, record(1), 2)
    assert assemble(store, record(0), 2, 0.1) == [record(0), record(1)]


def test_losing_the_store_says_who_held_it() -> None:
    server = tcp_server()
    client = tcp_client(server)
    outcomes: list[list[WorkerRecord] | RendezvousError] = []
    worker = threading.Thread(target=lambda: outcomes.extend(together(joining(client, record(1), 2))))
    worker.start()
    server.wait(["claim/1"])
    del server
    worker.join()
    (error,) = outcomes
    assert type(error) is RendezvousError
    assert "'w1' (rank 1) lost the rendezvous store" in str(error)


def test_a_left_over_file_is_suspected_in_a_double_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assemble(PrefixStore("group", FileStore(path, -1)), record(0), 1, LONG)
    with pytest.raises(DuplicateWorker, match="delete the rendezvous file"):
        assemble(PrefixStore("group", FileStore(path, -1)), record(0, incarnation=5), 1, LONG)


def test_64_workers_come_together_quickly_on_one_tcp_store() -> None:
    server = tcp_server()
    clients = [tcp_client(server) for _ in range(4)] * 16
    start = time.monotonic()
    outcomes = together(*(joining(client, record(rank), 64) for rank, client in enumerate(clients)))
    # It takes 0.15 s on two cores, also with 64 connections; the limit is for a machine that others use.
    assert time.monotonic() - start < 10
    assert outcomes == [[record(rank) for rank in range(64)]] * 64


PROGRAM = """
import os, sys
from telegrad.connection.worker_record import WorkerRecord
from telegrad.rendezvous import assemble, open_store
store, rank, world_size, _ = open_store(None, -1, None, 60.0)
me = WorkerRecord(name=f"w{rank}", id=rank, incarnation=rank, addresses=())
found = assemble(store, me, world_size, 60.0)
print([worker.name for worker in found], flush=True)
os._exit(0)  # as abruptly as rank 0 can
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A free port that nobody else gets: others cannot bind a port that is bound, unless they ask for that very one."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def test_processes_find_each_other_though_rank_0_exits_at_once(port: int) -> None:
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=environ | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    assert [worker.communicate()[0] for worker in workers] == ["['w0', 'w1', 'w2']\n"] * 3


# open_store


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def test_tcp_gives_a_store_at_its_address_and_rank_0_does_not_wait_for_others(port: int) -> None:
    store, rank, world_size, address = open_store(f"tcp://127.0.0.1:{port}", 0, 2, LONG)
    assert (rank, world_size, address) == (0, 2, ("127.0.0.1", port))
    other = open_store(f"tcp://127.0.0.1:{port}", 1, 2, LONG)[0]
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_port_0_is_reported_as_the_port_that_was_found() -> None:
    store, _, _, address = open_store("tcp://127.0.0.1:0", 0, 1, LONG)
    assert isinstance(store, TCPStore)
    assert address == ("127.0.0.1", store.port)
    assert store.port != 0


def test_env_is_the_default_and_gives_rank_and_world_size(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    assert open_store(None, -1, None, LONG)[1:] == (0, 3, ("127.0.0.1", port))


def test_arguments_beat_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert open_store("tcp://127.0.0.1:0", 0, 2, LONG)[1:3] == (0, 2)


def test_under_torchrun_rank_0_uses_the_store_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tcp_server()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(launcher.port))
    open_store("env://", 0, 1, LONG)[0].set("key", "value")
    assert launcher.get("key") == b"value"


def test_a_file_store_has_no_address(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    store, rank, world_size, address = open_store(url, 1, 2, LONG)
    assert (rank, world_size, address) == (1, 2, None)
    store.set("key", "value")
    assert open_store(url, 0, 2, LONG)[0].get("key") == b"value"


def test_rank_and_world_size_may_stand_in_the_url(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}/store?rank=1&world_size=2", -1, -1, LONG)[1:3] == (1, 2)
    with pytest.raises(RendezvousError, match="rank is 0 by argument and 1 in the init_method"):
        open_store(f"file://{tmp_path}/store?rank=1&world_size=2", 0, 2, LONG)


@pytest.mark.parametrize(
    ("init_method", "rank", "world_size", "message"),
    [
        ("env://", 0, 1, "MASTER_ADDR and MASTER_PORT must be set"),
        (None, -1, 1, "rank is not known: pass rank= to init_rpc, or set RANK"),
        (None, 0, None, "world_size is not known: .*set WORLD_SIZE"),
        ("tcp://127.0.0.1", 0, 1, "must name host and port"),
        ("tcp://127.0.0.1:port", 0, 1, "is not a URL"),
        ("127.0.0.1", 0, 1, "must begin with"),
        ("gopher://127.0.0.1:1", 0, 1, "gopher"),
        ("file:///no/such/directory/store", 0, 1, "directory that exists"),
        ("file://store", 0, 1, "full path"),
        ("tcp://127.0.0.1:0", 2, 2, "rank 2 is not possible in a group of 2"),
        ("tcp://127.0.0.1:0", 0, 70000, "world size of 70000"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    init_method: str | None, rank: int, world_size: int | None, message: str
) -> None:
    with pytest.raises(RendezvousError, match=message):
        open_store(init_method, rank, world_size, LONG)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "first", "rank must be a number"),
        ("MASTER_PORT", "99999", "MASTER_PORT must be a port"),
        ("MASTER_PORT", "", "MASTER_PORT must be set"),
    ],
)
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for variable, text in (environ | {name: value}).items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(RendezvousError, match=message):
        open_store(None, -1, None, LONG)


def test_an_absent_store_is_a_quiet_timeout_with_its_address(capfd: pytest.CaptureFixture[str], port: int) -> None:
    with pytest.raises(RendezvousTimeout, match=rf"127\.0\.0\.1:{port} after 0\.2 s"):
        open_store(f"tcp://127.0.0.1:{port}", 1, 2, 0.2)
    assert capfd.readouterr().err == ""


def test_a_store_that_opens_late_is_waited_for(capfd: pytest.CaptureFixture[str], port: int) -> None:
    found: list[Store] = []
    early = threading.Thread(target=lambda: found.append(open_store(f"tcp://127.0.0.1:{port}", 1, 2, LONG)[0]))
    early.start()
    host = open_store(f"tcp://127.0.0.1:{port}", 0, 2, LONG)[0]
    early.join()
    found[0].set("key", "value")
    assert host.get("key") == b"value"
    assert "Exception raised" not in capfd.readouterr().err


def test_a_second_rank_0_is_told_that_the_port_is_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"port {port} is in use .*another process runs as rank 0"):
            open_store(f"tcp://127.0.0.1:{port}", 0, 2, LONG)
