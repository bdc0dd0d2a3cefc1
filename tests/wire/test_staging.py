"""Copies between devices and host memory are started together and waited for once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad.errors import PayloadError
from telegrad.testing import accelerator
from telegrad.wire import staging
from telegrad.wire.staging import PINNED_FROM, DeviceCopy, ToDevices, copy_to_host, memory_of, wait_for
from telegrad.wire.tensors import decode_tensors, encode_tensors


def staged(tensors: list[torch.Tensor]) -> list[Any]:
    layout = encode_tensors(tensors)
    region = bytearray(layout.size)
    layout.write(region)
    return decode_tensors(layout.descriptors, region)


# These need no device: the CPU stands for one.


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("count", [5, PINNED_FROM])
def test_tensors_get_to_their_places(count: int, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pinned:
        monkeypatch.setattr(staging, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    x, y = torch.arange(count), torch.arange(12.0).view(3, 4).t()
    region = bytearray(x.nbytes + 16 + y.nbytes + 16)
    offset = (x.nbytes + 15) // 16 * 16
    copy_to_host([DeviceCopy(0, x, ()), DeviceCopy(offset, y, y.stride())], memoryview(region))
    assert torch.equal(torch.frombuffer(region, dtype=torch.int64, count=count), x)
    there = torch.frombuffer(region, dtype=torch.float32, count=12, offset=offset)
    assert torch.equal(there, torch.arange(12.0))


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PayloadError, match=r"shape \[2\] belongs on 'nonsense:0', but this worker has no such"):
        ToDevices().copy(torch.ones(2), "nonsense:0")


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (torch.OutOfMemoryError("it is full"), torch.OutOfMemoryError, "^it is full"),
        (RuntimeError("no kernel"), PayloadError, r"shape \[2\] and torch.float32 .* cannot copy it there: no kernel"),
    ],
)
def test_a_copy_that_fails_says_why(
    error: Exception, raised: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    x = torch.ones(2)
    monkeypatch.setattr(torch.Tensor, "to", fail)
    with pytest.raises(raised, match=says):
        ToDevices().copy(x, "cpu")


def test_integers_of_few_bits_are_copied_as_bytes() -> None:
    x = torch.arange(4, dtype=torch.uint8).view(torch.int4)
    copied = ToDevices().copy(x, "cpu")
    assert copied.dtype is torch.int4
    assert copied.view(torch.uint8).tolist() == [0, 1, 2, 3]


def test_all_devices_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waited.append(self.device)

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    wait_for([torch.device("cpu"), torch.device("meta"), torch.device("cuda:1"), torch.device("cuda:0")])
    assert waited == [torch.device("cuda:1"), torch.device("cuda:0")]


def test_a_device_that_cannot_wait_for_a_stream_is_waited_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            pass

        def synchronize(self) -> None:
            raise RuntimeError("Backend doesn't support synchronizing streams.")

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    wait_for([torch.device("mps:0")])
    assert waited == [torch.device("mps:0")]


def test_memory_of_a_tensor_begins_at_an_address() -> None:
    x = torch.arange(8, dtype=torch.uint8)
    assert memory_of(x, x.data_ptr() + 2, 3).tolist() == [2, 3, 4]


def test_memory_beyond_the_storage_of_a_tensor_is_an_error() -> None:
    x = torch.arange(8, dtype=torch.uint8)
    with pytest.raises(PayloadError, match="belong to different storages"):
        memory_of(x, x.data_ptr() + 2, 7)
    assert x.untyped_storage().nbytes() == 8


def test_a_machine_without_pinned_memory_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(torch, "empty", empty)
    assert staging._pinned(10) is None


# These are the truth.


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("count", [7, 100_000])
def test_tensors_of_devices_arrive_on_them(count: int, asynchronous: bool) -> None:
    accelerator.set_asynchronous(asynchronous)
    try:
        base = torch.arange(float(count), device="sim:0") * 3
        tensors = [
            torch.arange(count, device="sim:1"),
            base,
            base[1:5].view(2, 2),
            torch.ones(3),
            torch.arange(24.0, device="sim:1").view(2, 3, 4).transpose(0, 2),
            torch.tensor([1 + 2j, 3j], device="sim:0").conj(),
            torch.empty(0, 3, device="sim:1"),
        ]
        received = staged(tensors)
        for there, here in zip(received, tensors, strict=True):
            assert there.device == here.device
            assert torch.equal(there.cpu(), here.cpu().resolve_conj())
        received[2].zero_()
        assert received[1][:6].cpu().tolist() == [0, 0, 0, 0, 0, 15]
    finally:
        accelerator.set_asynchronous(False)


@pytest.mark.usefixtures("sim")
def test_a_message_is_copied_once_more_at_most_and_waited_for_once() -> None:
    tensors = [torch.ones(2**20, device=device) for device in ("sim:0", "sim:0", "sim:0", "sim:0")]
    size = sum(tensor.nbytes for tensor in tensors)
    layout = encode_tensors(tensors)
    region = bytearray(layout.size)
    accelerator.reset_copies()
    layout.write(region)
    out = accelerator.reset_copies()
    assert (out.device_to_host, out.within_device, out.synchronizations) == (size, 0, 1)
    assert out.non_blocking == len(tensors)  # into pinned memory
    received = decode_tensors(layout.descriptors, region)
    back = accelerator.reset_copies()
    assert (back.host_to_device, back.within_device, back.synchronizations) == (size, 0, 1)
    assert all(isinstance(x, torch.Tensor) and bool((x == 1).all()) for x in received)
