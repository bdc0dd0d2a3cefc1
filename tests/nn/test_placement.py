"""Parsing of placements."""

from __future__ import annotations

import pytest
import torch

from telegrad.errors import TelegradError, UnknownWorker
from telegrad.nn.placement import RemoteDevice, check_available, check_device, parse_remote_device

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize(
    ("text", "on", "device"),
    [
        ("b", "b", "cpu"),
        ("b/cpu", "b", "cpu"),
        ("b/cuda:1", "b", "cuda:1"),
        ("rank:1", 1, "cpu"),
        ("rank:2/cuda", 2, "cuda"),
        ("cpu", "a", "cpu"),
        ("cuda:1", "a", "cuda:1"),
        (torch.device("cpu"), "a", "cpu"),
    ],
)
def test_a_placement_is_a_worker_and_a_device(text: str, on: str | int, device: str) -> None:
    target = parse_remote_device(text)
    assert (target.worker, target.device) == (on, device)


@pytest.mark.parametrize("text", ["/", "/cuda:0", "b/cuda:0/cuda:1", ""])
def test_the_error_for_a_malformed_placement_shows_the_format(text: str) -> None:
    with pytest.raises(ValueError, match="The valid format is '<workername>/<device>'"):
        parse_remote_device(text)


@pytest.mark.parametrize("text", ["nobody", "nobody/cpu", "rank:7/cpu", "a:b/cpu"])
def test_the_error_for_an_unknown_worker_lists_the_workers(text: str) -> None:
    with pytest.raises(UnknownWorker, match=r"'a' \(0\), 'b' \(1\), 'c' \(2\)"):
        parse_remote_device(text)


@pytest.mark.parametrize("text", ["b/foo", "b/", "b/cpu2"])
def test_a_malformed_device_raises_torchs_error(text: str) -> None:
    with pytest.raises(RuntimeError, match=r"device string|Device string"):
        parse_remote_device(text)


def test_a_placement_that_is_not_a_string_raises() -> None:
    with pytest.raises(TypeError, match="'worker1/cpu'"):
        parse_remote_device(1)


def test_the_error_for_a_missing_device_lists_the_devices() -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(TelegradError, match=rf"worker 'a' has no device '{missing}' .*accelerator"):
        check_device(missing)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_worker_has_the_cpu_and_meta(device: str) -> None:
    assert check_available(RemoteDevice(2, device)) == RemoteDevice(2, device)


def test_a_device_that_a_worker_lacks_is_an_error_that_names_both_and_a_remedy() -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(TelegradError, match=rf"worker 'c' has no device '{missing}' .*such as 'c/cpu'"):
        check_available(RemoteDevice(2, missing))


@pytest.mark.usefixtures("sim")
def test_a_device_without_an_index_is_the_current_one() -> None:
    with torch.accelerator.device_index(1):
        assert check_device("sim") == torch.device("sim:1")
