"""The rendezvous that the launcher hosts: names, store, directory, token."""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import ResourceSnapshot
from tests.support.stores import reserved_port
from torch.distributed import Store, TCPStore

from telegrad.errors import TelegradError
from telegrad.launch import local_rendezvous
from telegrad.launch.listening import LOOPBACK
from telegrad.launch.local_rendezvous import LocalRendezvous, worker_names
from telegrad.observe.attach import socket_directories
from telegrad.rendezvous_store import open_store


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        (0, "1 to 65536 workers, but 0 were"),
        (-1, "but -1 were"),
        ([], "but 0 were"),
        (["a", "b", "a"], "'a' is given more than once"),
        (["a", "no spaces"], "no spaces"),
        (["a", ""], "''"),
        ("ab", "not the string 'ab'"),
    ],
)
def test_invalid_groups_are_refused_with_a_reason(workers: int | list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        worker_names(workers)


def test_workers_that_are_neither_a_number_nor_names_are_an_error() -> None:
    workers: Any = 2.5
    with pytest.raises(TypeError, match=r"workers must be a number or a list of names, not 2\.5"):
        worker_names(workers)


def test_workers_without_names_are_numbered() -> None:
    assert worker_names(3) == ["worker0", "worker1", "worker2"]
    assert worker_names(("ps", "trainer-0")) == ["ps", "trainer-0"]


def test_a_client_reaches_the_store_at_the_address_in_the_environment() -> None:
    with LocalRendezvous(["a"]) as rendezvous:
        variables = rendezvous.environment(0)
        client = TCPStore(variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), timeout=timedelta(seconds=60))
        client.set("key", "value")
        assert client.get("key") == b"value"


def test_the_store_of_the_launcher_keeps_to_the_allowed_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        pass
    monkeypatch.setenv("TELEGRAD_PORTS", str(port))
    with LocalRendezvous(["a"]) as rendezvous:
        assert rendezvous.port == port
        with pytest.raises(TelegradError, match="no port is free"):
            LocalRendezvous(["b"])


def open_and_write(url: str, name: str, value: str) -> Store:
    store = open_store(url, 0, 2, 60)[0]
    store.set(name, value)
    return store


@pytest.mark.parametrize("outlives_workers", [False, True])
def test_the_store_remains_when_all_workers_have_closed_it(
    outlives_workers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalRendezvous(["a", "b"], outlives_workers=outlives_workers) as rendezvous:
        variables = rendezvous.environment(0)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", variables["TORCHELASTIC_USE_AGENT_STORE"])
        url = variables["TELEGRAD_INIT_METHOD"]
        workers = [open_and_write(url, name, "entry") for name in "ab"]
        workers.clear()
        again = open_store(url, 0, 2, 60)[0]
        assert [again.get(name) for name in "ab"] == [b"entry", b"entry"]


def test_a_store_that_outlives_workers_survives_one_that_dies_while_it_writes() -> None:
    with LocalRendezvous(["a", "b"], outlives_workers=True) as rendezvous:
        client = TCPStore(LOOPBACK, rendezvous.port, timeout=timedelta(seconds=60))
        client.set("key", "value")
        with socket.create_connection((LOOPBACK, rendezvous.port)) as dying:
            # A client's greeting, then a part of the request to set a key: its kind, and the length of the key.
            dying.sendall(struct.pack("=BI", 0, 0x3C85F7CE) + struct.pack("=BQ", 1, 100) + b"ke")
        again = TCPStore(LOOPBACK, rendezvous.port, timeout=timedelta(seconds=60))
        assert again.get("key") == b"value"
        again.set("other", "x")
        assert client.get("other") == b"x"


def test_without_room_for_the_file_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise RuntimeError("write: No space left on device")

    monkeypatch.setattr("torch.distributed.FileStore", fail)
    with pytest.raises(TelegradError, match=r"cannot make the rendezvous file .*/store of the group: .*No space left"):
        LocalRendezvous(["a"])


def test_the_directory_is_private_and_short_and_removed_at_the_end() -> None:
    with LocalRendezvous(["a"]) as rendezvous:
        directory = Path(rendezvous.environment(0)["TELEGRAD_RUNTIME_DIR"])
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert len(str(directory)) < 55
        (directory / "socket").touch()
    assert not directory.exists()


def test_a_long_temporary_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    for wanted in ("", str(long)):
        monkeypatch.setenv("TELEGRAD_RUNTIME_DIR", wanted)
        with LocalRendezvous(["a"]) as rendezvous:
            assert rendezvous.directory.startswith("/tmp/tg-")


def test_the_directory_is_where_the_user_wants_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as wanted:
        monkeypatch.setenv("TELEGRAD_RUNTIME_DIR", wanted)
        monkeypatch.delenv("TELEGRAD_INIT_METHOD", raising=False)
        with LocalRendezvous(["a"]) as rendezvous:
            assert os.path.dirname(rendezvous.directory) == wanted
            assert socket_directories()[:2] == [Path(wanted), Path(rendezvous.directory)]
        monkeypatch.setenv("TELEGRAD_INIT_METHOD", "a group of which this process is a worker")
        with LocalRendezvous(["a"]) as rendezvous:
            assert os.path.dirname(rendezvous.directory) == tempfile.gettempdir()


def test_every_group_has_its_own_token() -> None:
    with LocalRendezvous(["a"]) as one, LocalRendezvous(["a"]) as other:
        tokens = {os.pread(rendezvous.token_descriptor, 100, 0) for rendezvous in (one, other)}
    assert len(tokens) == 2
    assert {len(token) for token in tokens} == {64}


def test_a_token_of_the_launcher_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TELEGRAD_TOKEN", "TELEGRAD_TOKEN_FD", "TELEGRAD_TOKEN_FILE"):
        monkeypatch.setenv(name, "of another group")
    with LocalRendezvous(["a"]) as rendezvous:
        assert "of another group" not in rendezvous.environment(0).values()


def test_a_closed_rendezvous_leaves_no_thread_and_no_descriptor() -> None:
    with LocalRendezvous(["a"]):
        pass  # torch keeps some resources after the first one
    before = ResourceSnapshot()
    with LocalRendezvous(["a"]):
        pass
    before.wait_until_restored()


def test_a_rendezvous_that_cannot_listen_leaves_no_directory_and_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(local_rendezvous, "_MAX_PARENT_LENGTH", 1000)
    monkeypatch.setenv("TELEGRAD_PORTS", "many")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="TELEGRAD_PORTS is 'many'"):
        LocalRendezvous(["a"])
    assert set(os.listdir("/proc/self/fd")) == before
    assert not list(tmp_path.iterdir())


def test_a_number_of_threads_in_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalRendezvous(["a"]) as rendezvous:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert rendezvous.environment(0)["OMP_NUM_THREADS"] == "1"
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert rendezvous.environment(0)["OMP_NUM_THREADS"] == "3"
