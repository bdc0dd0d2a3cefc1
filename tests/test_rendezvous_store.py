"""Opening the store: URLs, environment variables, and error messages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.full_file_system import full_file_system
from tests.support.stores import reserved_port, tcp_server
from torch.distributed import Store, TCPStore

from telegrad.errors import RendezvousError, RendezvousTimeout
from telegrad.rendezvous_store import open_store

LONG = 60.0
"""A timeout that no test reaches."""


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as number:
        yield number


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def test_tcp_opens_a_store_and_rank_0_does_not_wait_for_others(port: int) -> None:
    store, rank, world_size, address = open_store(f"tcp://127.0.0.1:{port}", 0, 2, LONG)
    assert (rank, world_size, address) == (0, 2, ("127.0.0.1", port))
    other = open_store(f"tcp://127.0.0.1:{port}", 1, 2, LONG)[0]
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_port_0_is_replaced_by_the_chosen_port() -> None:
    store, _, _, address = open_store("tcp://127.0.0.1:0", 0, 1, LONG)
    assert isinstance(store, TCPStore)
    assert address == ("127.0.0.1", store.port)
    assert store.port != 0


def test_env_is_the_default_and_provides_rank_and_world_size(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    assert open_store(None, -1, None, LONG)[1:] == (0, 3, ("127.0.0.1", port))


def test_arguments_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rank_and_world_size_may_be_in_the_url(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}/store?rank=1&world_size=2", -1, -1, LONG)[1:3] == (1, 2)
    with pytest.raises(RendezvousError, match="rank argument is 0, but the init_method says 1"):
        open_store(f"file://{tmp_path}/store?rank=1&world_size=2", 0, 2, LONG)


@pytest.mark.parametrize(
    ("init_method", "rank", "world_size", "message"),
    [
        ("env://", 0, 1, "MASTER_ADDR and MASTER_PORT must be set"),
        (None, -1, 1, "rank is unknown: pass rank= to init_rpc, or set RANK"),
        (None, 0, None, "world_size is unknown: .*set WORLD_SIZE"),
        ("tcp://127.0.0.1", 0, 1, "must contain host and port"),
        ("tcp://127.0.0.1:port", 0, 1, "is not a URL"),
        ("127.0.0.1", 0, 1, "must begin with"),
        ("gopher://127.0.0.1:1", 0, 1, "gopher"),
        ("file:///no/such/directory/store", 0, 1, "in an existing directory"),
        ("file://store", 0, 1, "full path"),
        ("tcp://127.0.0.1:0", 2, 2, "invalid rank 2: the ranks of 2 workers"),
        ("tcp://127.0.0.1:0", 0, 70000, "invalid world size 70000"),
    ],
)
def test_errors_name_the_missing_or_invalid_argument(
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
def test_errors_name_the_invalid_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for variable, text in (environ | {name: value}).items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(RendezvousError, match=message):
        open_store(None, -1, None, LONG)


def test_an_unreachable_store_is_a_timeout_without_log_output(capfd: pytest.CaptureFixture[str], port: int) -> None:
    with pytest.raises(RendezvousTimeout, match=rf"127\.0\.0\.1:{port} after 0\.2 s"):
        open_store(f"tcp://127.0.0.1:{port}", 1, 2, 0.2)
    assert capfd.readouterr().err == ""


def test_open_store_waits_for_rank_0_to_start(capfd: pytest.CaptureFixture[str], port: int) -> None:
    found: list[Store] = []
    early = threading.Thread(target=lambda: found.append(open_store(f"tcp://127.0.0.1:{port}", 1, 2, LONG)[0]))
    early.start()
    host = open_store(f"tcp://127.0.0.1:{port}", 0, 2, LONG)[0]
    early.join()
    found[0].set("key", "value")
    assert host.get("key") == b"value"
    assert "Exception raised" not in capfd.readouterr().err


def test_rank_0_reports_a_port_in_use() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"port {port} is in use .*another process with rank 0"):
            open_store(f"tcp://127.0.0.1:{port}", 0, 2, LONG)


@pytest.mark.parametrize("name", ["file", "new"])
def test_a_rendezvous_file_on_a_full_file_system_is_a_sentence(tmp_path: Path, name: str) -> None:
    with full_file_system(tmp_path / "full") as directory:
        with pytest.raises(RendezvousError, match=f"no space is left for the rendezvous file {directory}/{name};"):
            open_store(f"file://{directory}/{name}", 0, 1, 20.0)
