"""Options with torch's names."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch

from telegrad.drop_in.rpc import TensorPipeRpcBackendOptions as TensorPipeOptions
from telegrad.drop_in.rpc import backend_registry, options


def test_the_defaults_are_torchs() -> None:
    made = TensorPipeOptions()
    assert (made.num_worker_threads, made.rpc_timeout, made.init_method) == (16, 60.0, "env://")
    assert (made.device_maps, made.devices) == ({}, [])


def test_a_timeout_is_a_number() -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        TensorPipeOptions(rpc_timeout=timedelta(seconds=1))  # type: ignore[arg-type]  # the error is the point


def test_options_of_tensorpipe_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
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


def test_devices_are_those_of_an_accelerator() -> None:
    made = TensorPipeOptions(devices=["cuda:1", torch.device("xpu:0")])
    assert made.devices == [torch.device("cuda:1"), torch.device("xpu:0")]
    made.set_devices(["mtia:2"])
    assert made.devices == [torch.device("mtia:2")]
    for kind in ("cpu", "meta"):
        with pytest.raises(
            ValueError, match=f"`set_devices` expect a list of CUDA devices, but got device type {kind}."
        ):
            made.set_devices([kind])
