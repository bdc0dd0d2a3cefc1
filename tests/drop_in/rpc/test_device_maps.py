"""Device maps are checked when a group forms, and say which tensors may be sent."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from telegrad.agent.agent import Agent
from telegrad.drop_in.rpc import TensorPipeRpcBackendOptions as TensorPipeOptions
from telegrad.drop_in.rpc.device_maps import (
    Config,
    NamedDevice,
    TorchPlacement,
    check_device_maps,
    config_of,
    device_config,
    use_device_maps,
)
from telegrad.drop_in.rpc.options import _TensorPipeRpcBackendOptionsBase, frozen
from telegrad.errors import PayloadError
from telegrad.testing.group import local_group

_TWO_GPUS = (("cuda", 2),)


def config(maps: dict[str, Any] | None = None, devices: list[str] | None = None, available: Any = _TWO_GPUS) -> Config:
    return config_of(available, TensorPipeOptions(device_maps=maps, devices=list(devices or [])))


def on_no_worker() -> torch.Tensor:
    return torch.empty(2, device="meta")  # placements do not read the values


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (
            config({"nobody": {"cpu": "cpu"}}),
            r"Node a has invalid target node names in its device maps\ndevice maps = dict_keys\(\['nobody'\]\)\n"
            r"node names = \['a', 'b'\]",
        ),
        (
            config({"b": {"cuda:2": "cpu"}}),
            r"Node a has source devices with invalid indices in its device map for b\ndevice map = .*\n"
            r"device count = 2",
        ),
        (config({"b": {"cpu": "cuda:2"}}), "Node a has target devices with invalid indices in its device map for b"),
        (config({"b": {"xpu:0": "cpu"}}), "Node a has source devices with invalid indices in its device map for b"),
        (config({"b": {"cuda": "cpu"}}), "Node a has source devices with invalid indices in its device map for b"),
        (config({"b": {"cuda:0": "meta"}}), "Node a has target devices with invalid indices in its device map for b"),
        (
            config({"b": {"cuda:0": "cpu"}}, available=()),
            r"Node a has source devices with invalid indices in its device map for b\n.*\ndevice count = 0",
        ),
        (config(devices=["cuda:2"]), r"Node a has devices with invalid indices\ndevices = .*\ndevice count = 2"),
        (config(devices=["cuda:1", "cuda:1"]), r"Node a has duplicated devices\ndevices = "),
        (
            config({"b": {"cuda:0": "cuda:0"}}, ["cuda:1"]),
            r"Node a has unexpected source devices in its device map for b\ndevice map = .*\ndevices = ",
        ),
    ],
)
def test_invalid_device_maps_are_refused(mine: Config, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_device_maps({"a": mine, "b": config()})


def test_devices_of_a_backend_that_this_worker_did_not_load_are_checked_too() -> None:
    elsewhere = NamedDevice("elsewhere", 0)
    theirs: Config = ((("elsewhere", 1),), {"b": {elsewhere: elsewhere}}, [])
    text = r"Node a has target devices .*\ndevice map = \{device\(type='elsewhere', index=0\): device"
    with pytest.raises(ValueError, match=text):
        check_device_maps(pickle.loads(pickle.dumps({"a": theirs, "b": config()})))


def test_targets_that_the_other_worker_does_not_use_are_refused() -> None:
    mine, theirs = config({"b": {"cuda:0": "cuda:1"}}), config(devices=["cuda:0"])
    with pytest.raises(ValueError, match="Node a has unexpected target devices in its device map for b"):
        check_device_maps({"a": mine, "b": theirs})


def test_a_map_that_set_device_map_made_many_to_one_is_refused() -> None:
    made = TensorPipeOptions()
    made.set_device_map("b", {"cuda:0": "cuda:0"})
    made.set_device_map("b", {"cuda:1": "cuda:0"})
    with pytest.raises(ValueError, match="Node a has duplicated target devices in its device map for b"):
        check_device_maps({"a": config_of(_TWO_GPUS, made), "b": config()})


def test_valid_device_maps_pass() -> None:
    every = config({"a": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}, "b": {"cpu": "cuda:1", "cuda:1": "cpu"}})
    check_device_maps({"a": every, "b": config(), "c": config(available=())})
    check_device_maps({"a": config({"b": {"cuda:0": "cuda:1"}}, ["cuda:0"]), "b": config(devices=["cuda:1"])})
    check_device_maps({"a": config({"b": {"xpu:0": "cuda:1"}}, available=(("xpu", 1),)), "b": config()})


def test_maps_of_a_dynamic_group_may_name_workers_that_have_not_joined() -> None:
    mine = config({"later": {"cuda:0": "cuda:7"}})
    check_device_maps({"a": mine}, static=False)
    with pytest.raises(ValueError, match="Node a has target devices with invalid indices in its device map for later"):
        check_device_maps({"a": mine, "later": config()}, static=False)
    with pytest.raises(ValueError, match="Node a has source devices with invalid indices"):
        check_device_maps({"a": config({"later": {"cuda:7": "cuda:0"}})}, static=False)


def test_the_config_of_a_worker(agents: dict[str, Agent]) -> None:
    assert device_config() == (agents["a"].me.devices, {}, [])


# -- placement --------------------------------------------------------------------------------------------------------

_ADVICE = (
    "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before sending them "
    "over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure device mapping. "
)


@pytest.mark.parametrize(
    ("pairs", "is_reply", "text"),
    [
        ((), False, "Request device mapping is not available for destination b, but found tensor on device: meta"),
        ((), True, "Response device mapping is not available for destination b, but found tensor on device: meta"),
        (
            (("cuda:0", "cuda:1"),),
            False,
            "Request device mapping is not available for destination b for device meta but received a tensor on that "
            "device.",
        ),
        (
            (("cuda:0", "cuda:1"),),
            True,
            "Response device mapping is not available for destination b for device meta but received a tensor on that "
            "device.",
        ),
    ],
)
def test_a_device_without_a_map_is_torchs_error(pairs: Any, is_reply: bool, text: str) -> None:
    placement = TorchPlacement("a", "b", _TWO_GPUS, pairs, is_reply=is_reply)
    with pytest.raises(PayloadError) as caught:
        placement.unmapped(on_no_worker())
    assert str(caught.value) == _ADVICE + text


def test_tensors_on_the_cpu_stay_there_unless_they_are_mapped() -> None:
    assert TorchPlacement("a", "b", _TWO_GPUS, (("cuda:0", "cuda:1"),)).targets([torch.ones(2), 1]) == ["", ""]
    assert TorchPlacement("a", "b", _TWO_GPUS, (("cpu", "cuda:1"),)).targets([torch.ones(2)]) == ["cuda:1"]


def test_an_agent_follows_the_maps_that_have_a_reverse() -> None:
    made = TensorPipeOptions(device_maps={"b": {"cuda:0": "cuda:1", "cpu": "cpu"}})
    made._set_device_map(
        "c", {torch.device("cuda:0"): torch.device("cpu"), torch.device("cuda:1"): torch.device("cpu")}
    )
    with local_group(["a"]) as agents:
        use_device_maps(agents["a"], made)
        assert agents["a"].local.placement is TorchPlacement
        assert agents["a"].local.device_maps == {"b": (("cuda:0", "cuda:1"), ("cpu", "cpu"))}


def test_frozen_options_do_not_change() -> None:
    given = TensorPipeOptions(device_maps={"b": {"cuda:0": "cuda:1"}}, devices=["cuda:0"])
    kept = frozen(given)
    given.set_device_map("b", {"cuda:1": "cuda:0"})
    given.set_device_map("c", {"cuda:1": "cuda:0"})
    given.devices.append(torch.device("cuda:1"))
    assert kept.device_maps == {"b": {torch.device("cuda:0"): torch.device("cuda:1")}}
    assert kept.devices == [torch.device("cuda:0")]
    assert type(kept) is TensorPipeOptions


def test_there_is_one_cpu() -> None:
    indexed = {torch.device("cpu:0"): torch.device("cuda:1")}
    kept = frozen(_TensorPipeRpcBackendOptionsBase(device_maps={"b": indexed}))
    assert kept.device_maps == {"b": {torch.device("cpu"): torch.device("cuda:1")}}
