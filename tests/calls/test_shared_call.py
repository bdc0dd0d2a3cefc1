"""Calls of one function on several workers: encoded once."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from telegrad.calls.shared_call import SharedCall, size_of
from telegrad.futures import Future
from telegrad.testing.group import local_group
from telegrad.wire import payload
from telegrad.wire.encoded import Encoded

encoded: list[object] = []


class Counted:
    def __reduce__(self) -> tuple[Any, ...]:
        encoded.append(self)
        return Counted, ()


def count(value: Counted, tensor: torch.Tensor, *, factor: int) -> float:
    return factor * float(tensor.sum())


def test_arguments_are_encoded_once_for_all_workers() -> None:
    encoded.clear()
    with local_group(["a", "b", "c", "d"]) as agents:
        call = SharedCall(count, (Counted(), torch.ones(3)), {"factor": 2})
        futures: list[Future[Any]] = [Future(agents["a"]).start(name, call, (), None, None) for name in agents]
        assert [future.wait() for future in futures] == [6.0] * 4
    assert len(encoded) == 1


def test_a_function_without_a_name_is_one_of_the_values() -> None:
    call = SharedCall(lambda: 1, (), None)
    name, made = call.encode(payload.encode, by_name=True, edges=False)
    function: Any = payload.decode(made.data, made.attachments)
    assert (name, function[0](), function[1:]) == ("", 1, ((), {}))


def test_what_is_sent_by_name_depends_on_the_program_of_the_callee() -> None:
    call = SharedCall(count, (), None)
    same, other = (call.encode(payload.encode, by_name=by_name, edges=False) for by_name in (True, False))
    assert same[1] is not other[1]
    assert call.encode(payload.encode, by_name=True, edges=False) is same


def test_the_size_of_a_value_includes_its_attachments() -> None:
    buffer = pickle.PickleBuffer(bytearray(100))
    assert size_of(Encoded(b"12345", [torch.zeros(4, dtype=torch.double), buffer])) == 5 + 32 + 100
