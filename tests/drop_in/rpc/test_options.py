"""Options as torch takes them."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch

from telegrad.drop_in.rpc import TensorPipeRpcBackendOptions as TensorPipeOptions
from telegrad.drop_in.rpc import backend_registry, options
from telegrad.drop_in.rpc.device_maps import check_device_maps
from telegrad.testing.group import local_group


def test_the_defaults_are_torchs() -> None:
    made = TensorPipeOptions()
    assert (made.num_worker_threads, made.rpc_timeout, made.init_method) == (16, 60.0, "env://")
    assert (made.device_maps, made.devices) == ({}, [])


def test_a_timeout_is_a_number() -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        TensorPipeOptions(rpc_timeout=timedelta(seconds=1))  # type: ignore[arg-type]  # the error is the point


def test_options_of_tensorpipe_that_mean_nothing_are_accepted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    options._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="telegrad"):
        for _ in range(2):
            backend_registry.construct_rpc_backend_options(
                backend_registry.BackendType.TENSORPIPE, _transports=["uv"], _channels=["basic"]
            )
    assert [record.getMessage() for record in caplog.records] == [
        "telegrad ignores the TensorPipe option _transports",
        "telegrad ignores the TensorPipe option _channels",
    ]


def test_a_device_map_is_one_to_one() -> None:
    made = TensorPipeOptions(device_maps={"b": {"cuda:0": "cuda:1"}})
    assert made.device_maps == {"b": {torch.device("cuda:0"): torch.device("cuda:1")}}
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping"):
        made.set_device_map("b", {"cuda:0": "cuda:0"})
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping"):
        made.set_device_map("b", {"cuda:2": "cuda:3", "cuda:4": "cuda:3"})
    with pytest.raises(ValueError, match="expect a list of CUDA devices"):
        made.set_devices(["cpu"])


@pytest.mark.parametrize(
    ("maps", "devices", "text"),
    [
        ({"nobody": {"cpu": "cpu"}}, [], "Node a has invalid target node names in its device maps"),
        ({"a": {"cuda:63": "cpu"}}, [], "Node a has source devices with invalid indices in its device map for a"),
        ({"a": {"cpu": "cuda:63"}}, [], "Node a has target devices with invalid indices in its device map for a"),
        ({}, ["cuda:63"], "Node a has devices with invalid indices"),
        ({}, ["cuda:63", "cuda:63"], "Node a has duplicated devices"),
    ],
)
def test_device_maps_that_cannot_be_followed_are_refused(
    maps: dict[str, dict[int | str | torch.device, int | str | torch.device]], devices: list[str], text: str
) -> None:
    made = TensorPipeOptions(device_maps=maps, devices=list(devices))
    with local_group(["a"]) as agents, pytest.raises(ValueError, match=text):
        check_device_maps(agents["a"], made)


def test_a_backend_can_be_registered_once() -> None:
    before = backend_registry.BackendType
    try:
        member = backend_registry.register_backend("mine", lambda timeout, where: (timeout, where), lambda: "agent")
        assert backend_registry.backend_registered("mine")
        assert backend_registry.construct_rpc_backend_options(member, 1.0, "x") == (1.0, "x")
        assert backend_registry.init_backend(member) == "agent"
        with pytest.raises(RuntimeError, match="RPC backend mine: already registered"):
            backend_registry.register_backend("mine", print, print)
    finally:
        backend_registry.BackendType = before
