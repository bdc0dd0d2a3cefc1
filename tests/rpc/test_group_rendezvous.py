"""init_rpc again and again, into groups that exist, and without a store, with real processes."""

from __future__ import annotations

import operator
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.stores import reserved_port

import telegrad
from telegrad import launch, rpc
from telegrad.errors import RendezvousError, TelegradError

SECONDS = 60.0
BY_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "TELEGRAD_AWAITED_REPLACEMENT",
    "TELEGRAD_INIT_METHOD",
    "TELEGRAD_NAME",
    "TELEGRAD_RESTART",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*BY_LAUNCHERS, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["file", "tcp", "env"])
def init_method(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/store"
        return
    with reserved_port() as port:
        if request.param == "tcp":
            yield f"tcp://127.0.0.1:{port}"
        else:
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
            monkeypatch.setenv("MASTER_PORT", str(port))
            yield "env://"


Start = Callable[..., launch.Group]


@pytest.fixture
def start(init_method: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts a process outside of any launcher's rendezvous."""
    started: list[launch.Group] = []
    address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    runtime = tempfile.mkdtemp(prefix="tg-")  # killed workers leave their sockets there
    monkeypatch.setenv("TELEGRAD_RUNTIME_DIR", runtime)

    def begin(function: Callable[..., Any], *args: Any) -> launch.Group:
        def run() -> Any:
            for name in BY_LAUNCHERS:
                os.environ.pop(name, None)
            for variable, value in zip(("MASTER_ADDR", "MASTER_PORT"), address, strict=True):
                if value is not None:
                    os.environ[variable] = value
            os.environ["TELEGRAD_RUNTIME_DIR"] = runtime
            os.environ["TELEGRAD_TOKEN"] = "9f1c02d77ab34e658d10c2f4b7e69a3d"
            return function(*args)

        started.append(launch.start(run, workers=1, init=False, prefix=False))
        return started[-1]

    yield begin
    rpc.shutdown(graceful=False)
    for group in started:
        group.stop()
    shutil.rmtree(runtime)


def options(init_method: str) -> telegrad.Options:
    return telegrad.Options(init_method=init_method, init_timeout=SECONDS, token="9f1c02d77ab34e658d10c2f4b7e69a3d")


def take_part(init_method: str, rank: int, world_size: int | None) -> int:
    """Form a group once, and call the next worker."""
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options(init_method))
    others = [info for info in rpc.get_worker_infos() if info.id != rank]
    result: int = rpc.rpc_sync(others[0], operator.add, (rank, 10))
    rpc.shutdown()
    return result


@pytest.mark.parametrize("mine", [0, 1])
def test_a_process_forms_groups_with_fresh_partners_again_and_again(init_method: str, start: Start, mine: int) -> None:
    for _ in range(5):
        partner = start(take_part, init_method, 1 - mine, 2)
        assert take_part(init_method, mine, 2) == mine + 10
        assert partner.join(SECONDS) == [1 - mine + 10]


def forms_groups(init_method: str, rank: int, times: int) -> list[int]:
    return [take_part(init_method, rank, 3) for _ in range(times)]


def test_the_same_processes_form_groups_again_and_again(init_method: str, start: Start) -> None:
    others = [start(forms_groups, init_method, rank, 8) for rank in (1, 2)]
    assert forms_groups(init_method, 0, 8) == [10] * 8
    assert [other.join(SECONDS) for other in others] == [[[11] * 8], [[12] * 8]]


def serve(init_method: str, rank: int, world_size: int | None) -> None:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options(init_method))
    rpc.wait_for_worker("w1", SECONDS)
    threading.Event().wait(SECONDS)


def test_a_worker_joins_again_after_it_left_alone(init_method: str, start: Start) -> None:
    host, third = start(serve, init_method, 0, 3), start(serve, init_method, 2, 3)
    for number in range(3):
        rpc.init_rpc("w1", rank=1, world_size=3, rpc_backend_options=options(init_method))
        assert rpc.rpc_sync("w0", operator.add, (number, 1)) == number + 1
        assert rpc.rpc_sync("w2", operator.add, (number, 1)) == number + 1
        rpc.shutdown(graceful=False)
    host.kill("worker0")
    third.kill("worker0")


@pytest.mark.parametrize("restart", ["1", None])
def test_rank_0_which_hosts_the_store_is_killed_and_replaced(
    init_method: str, start: Start, restart: str | None
) -> None:
    first, third = start(serve, init_method, 0, 3), start(serve, init_method, 2, 3)
    rpc.init_rpc("w1", rank=1, world_size=3, rpc_backend_options=options(init_method))
    try:
        assert rpc.rpc_sync("w0", operator.add, (1, 1)) == 2
        lost = threading.Event()
        rpc.on_worker_lost(lambda worker, reason: lost.set())
        first.kill("worker0")
        assert lost.wait(SECONDS)

        def replace() -> None:
            if restart is not None:
                os.environ["TELEGRAD_RESTART"] = restart
            serve(init_method, 0, 3)

        start(replace)
        rpc.wait_for_worker("w0", SECONDS)
        assert rpc.rpc_sync("w0", operator.add, (2, 2)) == 4
        assert rpc.rpc_sync("w2", operator.add, (3, 3)) == 6
    finally:
        rpc.shutdown(graceful=False)
    third.kill("worker0")


def visit(init_method: str, name: str) -> int:
    rpc.init_rpc(name, rpc_backend_options=options(init_method))
    assert rpc.rpc_sync("w0", operator.add, (1, 1)) == 2
    rank = rpc.get_worker_info().id
    rpc.shutdown()
    return rank


def test_an_open_group_grows_and_shrinks(init_method: str, start: Start) -> None:
    rpc.init_rpc("w0", rank=0, rpc_backend_options=options(init_method))
    visits = [start(visit, init_method, name) for name in "abc"]
    ranks = [visit.join(SECONDS) for visit in visits]
    assert sorted(ranks) == [[1], [2], [3]]
    assert [start(visit, init_method, name).join(SECONDS) for name in "abc"] == ranks, "names keep their ids"
    rpc.shutdown()


def fails(init_method: str, rank: int) -> None:
    rpc.init_rpc("no spaces allowed", rank=rank, world_size=2, rpc_backend_options=options(init_method))


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_a_worker_with_an_invalid_argument(init_method: str, start: Start, rank: int) -> None:
    failing = start(fails, init_method, rank)
    with pytest.raises(
        RendezvousError, match="failed in init_rpc: ValueError: invalid worker name 'no spaces allowed'"
    ):
        rpc.init_rpc(f"w{1 - rank}", rank=1 - rank, world_size=2, rpc_backend_options=options(init_method))
    with pytest.raises(TelegradError, match="invalid worker name"):
        failing.join(SECONDS)


def fails_late(init_method: str, kind: str) -> None:
    """Fail when the records of all workers are known, or when this worker has opened the store."""
    bad = options(init_method)
    if kind == "device map":
        bad.device_maps = {"nobody": {"cpu": "cpu"}}
    else:
        bad.tls_certificate = bad.tls_key = bad.tls_ca = "/there/is/no/such/file"
    rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=bad)


@pytest.mark.parametrize(
    ("kind", "cause"), [("device map", "device_maps of worker 'w1' names worker 'nobody'"), ("certificate", "such")]
)
def test_nobody_goes_on_without_a_worker_that_cannot_join(tmp_path: Path, kind: str, cause: str) -> None:
    method = f"file://{tmp_path / 'store'}"
    failing = launch.start(lambda: fails_late(method, kind), workers=1, init=False)
    with failing, pytest.raises(RendezvousError, match=rf"worker 'w1' \(rank 1\) failed in init_rpc: .*{cause}"):
        rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=options(method))
