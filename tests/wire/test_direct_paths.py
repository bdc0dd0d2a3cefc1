"""Tensors that go from device to device without host memory: a handle of each travels instead."""

from __future__ import annotations

import pytest
import torch

from telegrad.errors import ProtocolError
from telegrad.testing import accelerator
from telegrad.wire.descriptors import BUFFER, CODES, DIRECT, TensorDescriptor
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


def handle_of(shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32) -> TensorDescriptor:
    part = TensorDescriptor(BUFFER, 0, 0, (1,))
    return TensorDescriptor(DIRECT, CODES[dtype], 0, shape, parts=(part,))


@pytest.mark.usefixtures("asynchronous_sim")
def test_only_handles_of_tensors_on_devices_travel() -> None:
    path = Handles()
    placement = Placement("a", "b", (("sim", 2),), (("sim:1", "sim:0"),), direct=path)
    tensors = [
        torch.arange(1000.0, device="sim:0").requires_grad_(),
        torch.arange(1000.0, device="sim:1").view(10, 100).t(),
        torch.arange(3),
        torch.empty(0, device="sim:0"),
        torch.ones(2, 2, device="sim:0").to_sparse(),
    ]
    layout = encode_tensors(tensors, placement=placement)
    region = bytearray(layout.size)
    accelerator.reset_copies()
    layout.write(region)
    assert accelerator.reset_copies().device_to_host == 0
    assert [descriptor.form == DIRECT for descriptor in layout.descriptors] == [True, True, False, False, False]
    received = decode_tensors(layout.descriptors, region, path)
    assert path.shared == {}
    for there, here, device in zip(received, tensors, ["sim:0", "sim:0", "cpu", "sim:0", "sim:0"], strict=True):
        assert isinstance(there, torch.Tensor)
        assert (str(there.device), there.requires_grad) == (device, here.requires_grad)
        assert torch.equal(there.detach().cpu().to_dense(), here.detach().cpu().to_dense())


def test_without_a_path_a_handle_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="switched off here: set direct_devices on all workers or on none"):
        decode_tensors([handle_of()], bytearray(16))


def test_what_does_not_fit_its_handle_is_an_error() -> None:
    path = Handles()
    for descriptor, says in {
        handle_of((3,)): "another tensor than its handle has",
        handle_of((2,), torch.int64): "another tensor than its handle has",
        TensorDescriptor(DIRECT, CODES[torch.float32], 0, (2,)): "without a handle",
    }.items():
        path.shared = {b"0": torch.ones(2)}
        with pytest.raises(ProtocolError, match=says):
            decode_tensors([descriptor], bytearray(b"0" + bytes(15)), path)
    path.shared = {b"0": torch.ones(2)}
    (opened,) = decode_tensors([handle_of()], bytearray(b"0" + bytes(15)), path)
    assert isinstance(opened, torch.Tensor)
    assert opened.tolist() == [1, 1]
