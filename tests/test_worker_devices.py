"""The accelerators that a worker is to use."""

from __future__ import annotations

import pytest
import torch

import telegrad
from telegrad import launch, worker_devices
from telegrad.errors import TelegradError
from telegrad.launch import WorkerFailed
from telegrad.testing import accelerator
from telegrad.worker_devices import assigned, by_local_rank, parse, share


@pytest.fixture(autouse=True)
def no_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TELEGRAD_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def names() -> list[str]:
    return [str(device) for device in telegrad.rpc.devices()]


@pytest.mark.parametrize("text", ["a", "0,", "-1", "0,0", "1.5", ",", "\u0661"])
def test_a_malformed_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="TELEGRAD_DEVICES must be indices of different devices, such as 0,1"):
        parse(text)


def test_a_list_may_be_empty_and_have_spaces() -> None:
    assert parse(" ") is None
    assert parse(" 3, 1 ") == [3, 1]


@pytest.mark.usefixtures("sim")
def test_without_an_assignment_a_worker_has_all_devices() -> None:
    assert names() == ["sim:0", "sim:1"]


@pytest.mark.usefixtures("sim")
def test_the_assigned_devices_come_first_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TELEGRAD_DEVICES", "1,0")
    assert names() == ["sim:1", "sim:0"]


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(
    ("rank", "workers", "expected"),
    [("1", "2", [1]), ("0", "2", [0]), ("0", "1", None), ("1", "3", None), ("2", "2", None), ("x", "2", None)],
)
def test_each_of_several_workers_has_the_device_of_its_local_rank_if_there_are_enough(
    rank: str, workers: str, expected: list[int] | None
) -> None:
    assert by_local_rank({"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": workers}) == expected


@pytest.mark.usefixtures("sim")
def test_an_assigned_device_that_does_not_exist_is_an_error_with_both_numbers() -> None:
    with pytest.raises(TelegradError, match=r"names device 5, so 6 devices are needed, but this machine has 2 .*sim:0"):
        assigned({"TELEGRAD_DEVICES": "0,5"})


@pytest.mark.usefixtures("sim")
def test_devices_are_shared_out_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [share(rank, 2, 1, {}) for rank in range(2)] == ["0", "1"]
    assert [share(rank, 2, 2, {"TELEGRAD_DEVICES": "7,4,5,6"}) for rank in range(2)] == ["7,4", "5,6"]
    with pytest.raises(ValueError, match=r"3 workers with 1 device each need 3 devices, but this machine has 2"):
        share(0, 3, 1, {})
    with pytest.raises(ValueError, match=r"2 workers with 2 devices each need 4 devices, but TELEGRAD_DEVICES names 2"):
        share(0, 2, 2, {"TELEGRAD_DEVICES": "0,1"})
    with pytest.raises(ValueError, match="at least 1, not 0"):
        share(0, 2, 0, {})
    monkeypatch.setattr(worker_devices, "local_devices", lambda: ())
    assert share(1, 2, 3, {}) == "3,4,5"  # the workers may load a backend that this process does not have


def device_here() -> str:
    return str(torch.empty(0, device="sim").device)


def work() -> tuple[list[str], str, list[str]]:
    accelerator.install(devices=4)
    telegrad.init_rpc()
    mine = names()
    me = telegrad.get_worker_info().id
    others = [telegrad.rpc_sync(f"worker{(me + 1) % 2}", device_here) for _ in range(3)]
    here = device_here()
    telegrad.shutdown()
    return mine, here, others


@pytest.mark.usefixtures("sim")
@pytest.mark.timeout(120)
def test_the_first_device_is_current_on_every_thread_of_a_worker() -> None:
    assert launch.local(work, 2, init=False) == [
        (["sim:0"], "sim:0", ["sim:1"] * 3),
        (["sim:1"], "sim:1", ["sim:0"] * 3),
    ]


@pytest.mark.usefixtures("sim")
@pytest.mark.timeout(120)
def test_a_launcher_assigns_consecutive_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_DEVICES", "0,1,2,3")
    assert launch.local(work, 2, init=False, devices_per_worker=2) == [
        (["sim:0", "sim:1"], "sim:0", ["sim:2"] * 3),
        (["sim:2", "sim:3"], "sim:2", ["sim:0"] * 3),
    ]
    monkeypatch.delenv("TELEGRAD_DEVICES")
    with pytest.raises(ValueError, match="2 workers with 2 devices each need 4 devices, but this machine has 2"):
        launch.local(work, 2, init=False, devices_per_worker=2)


@pytest.mark.timeout(120)
def test_a_worker_without_the_assigned_devices_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_devices, "local_devices", lambda: ())  # as on a machine without accelerators
    with pytest.raises(
        WorkerFailed, match=r"TELEGRAD_DEVICES .* needed, but this machine has 0 .*loaded before init_rpc"
    ):
        launch.local(telegrad.rpc.barrier, 2, devices_per_worker=1000)
