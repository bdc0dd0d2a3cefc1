"""Device maps are checked when a group forms."""

from __future__ import annotations

import pytest
import torch

from telegrad.drop_in.rpc import TensorPipeRpcBackendOptions as TensorPipeOptions
from telegrad.drop_in.rpc.device_maps import check_device_maps
from telegrad.testing.group import local_group


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
def test_invalid_device_maps_are_refused(
    maps: dict[str, dict[int | str | torch.device, int | str | torch.device]], devices: list[str], text: str
) -> None:
    made = TensorPipeOptions(device_maps=maps, devices=list(devices))
    with local_group(["a"]) as agents, pytest.raises(ValueError, match=text):
        check_device_maps(agents["a"], made)
