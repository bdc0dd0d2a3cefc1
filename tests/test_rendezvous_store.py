"""Opening the store: URLs, environment variables, and error messages."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.full_file_system import full_file_system
from tests.support.loaded_interpreter import run_loaded
from tests.support.stores import reserved_port, tcp_server
from torch.distributed import Store, TCPStore

from telegrad import rendezvous_store
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
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TELEGRAD_INIT_METHOD",
    ):
        monkeypatch.delenv(name, raising=False)


def test_tcp_opens_a_store_and_rank_0_does_not_wait_for_others(port: int) -> None:
    store, *rest = open_store(f"tcp://127.0.0.1:{port}", 0, 2, LONG)
    assert rest == [0, 2, ("127.0.0.1", port), True]
    other, *rest = open_store(f"tcp://127.0.0.1:{port}", 1, 2, LONG)
    assert rest == [1, 2, ("127.0.0.1", port), False]
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_port_0_is_replaced_by_the_chosen_port() -> None:
    store, _, _, address, _ = open_store("tcp://127.0.0.1:0", 0, 1, LONG)
    assert isinstance(store, TCPStore)
    assert address == ("127.0.0.1", store.port)
    assert store.port != 0


def test_rank_0_hosts_the_store_only_at_a_port_that_is_allowed(port: int) -> None:
    with pytest.raises(RendezvousError, match=f"port {port}: TELEGRAD_PORTS or .* allows only 29600-29604"):
        open_store(f"tcp://127.0.0.1:{port}", 0, 2, LONG, ports=range(29600, 29605))
    store, *_ = open_store(f"tcp://127.0.0.1:{port}", 0, 2, LONG, ports=(29600, port))
    other, *_ = open_store(f"tcp://127.0.0.1:{port}", 1, 2, LONG, ports=(29600,))  # somebody else hosts it
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_env_is_the_default_and_provides_rank_and_world_size(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    assert open_store(None, -1, None, LONG)[1:] == (0, 3, ("127.0.0.1", port), True)


def test_arguments_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert open_store("tcp://127.0.0.1:0", 0, 2, LONG)[1:3] == (0, 2)


def test_under_torchrun_rank_0_uses_the_store_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tcp_server()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(launcher.port))
    opened = open_store("env://", 0, 1, LONG)
    assert not opened.is_host
    opened.store.set("key", "value")
    assert launcher.get("key") == b"value"


def test_a_file_store_has_no_address(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    store, *rest = open_store(url, 1, 2, LONG)
    assert rest == [1, 2, None, False]
    store.set("key", "value")
    assert open_store(url, 0, 2, LONG)[0].get("key") == b"value"


def test_rank_and_world_size_may_be_in_the_url(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}/store?rank=1&world_size=2", -1, -1, LONG)[1:3] == (1, 2)
    with pytest.raises(RendezvousError, match="rank argument is 0, but the init_method says 1"):
        open_store(f"file://{tmp_path}/store?rank=1&world_size=2", 0, 2, LONG)


def test_a_script_without_a_launcher_is_told_how_to_start_it(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import telegrad; telegrad.init_rpc()")
    done = run_loaded([sys.executable, "hello.py"], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, timeout=60)
    assert done.returncode == 1
    assert "no launcher has started this process: start it with `telegrad run -n 2 hello.py`" in done.stderr
    done = run_loaded([sys.executable, "-c", script.read_text()], env={"PATH": os.environ["PATH"]}, timeout=60)
    assert "telegrad.launch.workers(2) starts two workers" in done.stderr


@pytest.mark.parametrize(
    ("init_method", "rank", "world_size", "message"),
    [
        ("env://", 0, 1, "MASTER_ADDR and MASTER_PORT must be set"),
        (None, -1, 1, "rank is unknown: pass rank= to init_rpc, or set RANK"),
        ("tcp://127.0.0.1:0", 70000, None, "invalid rank 70000: the ranks of an open group are 0 to 65535"),
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


def test_an_unknown_rendezvous_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(RendezvousError, match=r"foo://x.*Use env://, tcp://host:port or file:///path"):
        open_store("foo://x", 0, 1, 1.0)


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


@pytest.mark.parametrize("given", [None, 0])
def test_without_a_world_size_the_group_is_open(tmp_path: Path, given: int | None) -> None:
    assert open_store(f"file://{tmp_path}/store", -1, given, LONG)[1:] == (-1, 0, None, False)
    assert open_store(f"file://{tmp_path}/store", 3, given, LONG)[1:] == (3, 0, None, False)


def test_a_file_remains_for_the_next_group(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    open_store(url, 0, 1, LONG).store.set("key", "value")
    assert open_store(url, 0, 1, LONG).store.get("key") == b"value"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_host_is_named_after_a_few_seconds(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(rendezvous_store, "_UNKNOWN_HOST_LIMIT", 0.05)
    with pytest.raises(RendezvousError, match=r"the host name 'no-such-host\.invalid' is unknown .*MASTER_ADDR"):
        open_store("tcp://no-such-host.invalid:29500", rank, 2, LONG)


@pytest.mark.parametrize("init_method", ["env://", "file:///launcher/store"])
def test_more_workers_than_the_launcher_has_started_are_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, init_method: str, tmp_path: Path
) -> None:
    init_method = init_method.replace("/launcher", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TELEGRAD_INIT_METHOD", f"file://{tmp_path}/store")
    with pytest.raises(RendezvousError, match="called for 3 workers, but the launcher has started 2"):
        open_store(init_method, 0, 3, LONG)
    own = open_store(f"file://{tmp_path}/own", 0, 3, LONG)  # a rendezvous that the launcher knows nothing of
    assert own.world_size == 3


def test_a_worker_that_waits_for_the_store_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, port: int
) -> None:
    monkeypatch.setattr(rendezvous_store, "_FIRST_LOG", 0.05)
    with pytest.raises(RendezvousTimeout):
        open_store(f"tcp://127.0.0.1:{port}", 1, 2, 0.3)
    lines = [record.getMessage() for record in caplog.records]
    assert 2 <= len(lines) <= 4, "not ever more rarely"
    assert "the worker with rank 1 has waited 0." in lines[0]
    assert f" s for the rendezvous store at 127.0.0.1:{port}, which rank" in lines[0]
