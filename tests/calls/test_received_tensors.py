"""A received tensor is recognized for as long as it exists."""

from __future__ import annotations

import torch

from telegrad.calls.received_tensors import ReceivedTensors
from telegrad.wire.in_place import SMALLEST


def received_tensor(size: int = SMALLEST) -> torch.Tensor:
    return torch.frombuffer(bytearray(size), dtype=torch.uint8)


def test_memory_of_a_received_tensor_is_its_own() -> None:
    received = ReceivedTensors()
    tensor, other = received_tensor(), received_tensor()
    received.add([tensor, b"something else", received_tensor(8)])
    assert received.is_only_access(tensor)
    assert not received.is_only_access(other)  # the program may have made it over memory that it still uses
    view = tensor[1:]
    assert not received.is_only_access(tensor)
    del view


def test_other_memory_of_a_received_tensor_may_have_another_owner() -> None:
    received, outside = ReceivedTensors(), bytearray(SMALLEST)
    tensor = received_tensor()
    received.add([tensor])
    tensor.data = torch.frombuffer(outside, dtype=torch.uint8)
    assert not received.is_only_access(tensor)
    assert len(received) == 0  # the memory in which it was received is gone


def test_a_received_tensor_can_be_swapped() -> None:
    received = ReceivedTensors()
    tensor, other = received_tensor(), torch.ones(3)
    received.add([tensor])
    torch.utils.swap_tensors(tensor, other)
    assert received.is_only_access(other)


def test_sparse_tensors_in_large_messages_are_not_noted() -> None:
    received = ReceivedTensors()
    received.add([torch.eye(3).to_sparse(), received_tensor()])
    assert len(received) == 0  # the second one is gone, and the first has no storage


def test_received_tensors_are_not_kept() -> None:
    received = ReceivedTensors()
    tensor = received_tensor()
    received.add([tensor])
    assert len(received) == 1
    del tensor
    assert len(received) == 0
