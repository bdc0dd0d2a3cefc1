"""Tensors that go from device to device without host memory: a handle of each travels instead."""

from __future__ import annotations

import pytest
import torch

from telegrad.testing import accelerator
from telegrad.wire.descriptors import DIRECT
from telegrad.wire.devices import Placement
from telegrad.wire.tensors import decode_tensors, encode_tensors


class Handles:
    """A path inside one process: a handle is a number."""

    kind = "sim"

    def __init__(self) -> None:
        self.shared: dict[bytes, torch.Tensor] = {}

    def share(self, x: torch.Tensor) -> bytes:
        handle = str(len(self.shared)).encode()
        self.shared[handle] = x.clone()
        return handle

    def open(self, handle: bytes) -> torch.Tensor:
        return self.shared.pop(handle)


@pytest.mark.usefixtures("asynchronous_sim")
def test_only_handles_of_tensors_on_devices_travel() -> None:
    path = Handles()
    placement = Placement("a", "b", (("sim", 2),), (("sim:1", "sim:0"),), direct=path)
    tensors = [
        torch.arange(1000.0, device="sim:0").requires_grad_(),
        torch.arange(1000.0, device="sim:1").view(10, 100).t(),
        torch.arange(3),
        torch.empty(0, device="sim:0"),
    ]
    layout = encode_tensors(tensors, placement=placement)
    region = bytearray(layout.size)
    accelerator.reset_copies()
    layout.write(region)
    assert accelerator.reset_copies().device_to_host == 0
    assert [descriptor.form == DIRECT for descriptor in layout.descriptors] == [True, True, False, False]
    received = decode_tensors(layout.descriptors, region, path)
    assert path.shared == {}
    for there, here, device in zip(received, tensors, ["sim:0", "sim:0", "cpu", "sim:0"], strict=True):
        assert isinstance(there, torch.Tensor)
        assert (str(there.device), there.requires_grad) == (device, here.requires_grad)
        assert torch.equal(there.detach().cpu(), here.detach().cpu())
