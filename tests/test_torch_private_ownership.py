"""Whatever else holds a tensor or its memory is noticed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import torch_private_ownership
from telegrad.torch_private_ownership import is_only_access, nobody_else_holds


def made() -> torch.Tensor:
    return torch.ones(8) * 2


def test_where_references_are_not_all_counted_nothing_is_taken_for_unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = made()
    assert nobody_else_holds(grad, 1)
    assert not nobody_else_holds(grad, 0)
    monkeypatch.setattr(torch_private_ownership, "_COUNTS_ALL", False)  # as from Python 3.14 on
    assert not nobody_else_holds(grad, 1)


def saved_by_the_graph() -> tuple[torch.Tensor, Any]:
    result = torch.ones(8, requires_grad=True).exp()
    return result, None  # its grad_fn has saved it


def input_of_an_operation() -> tuple[torch.Tensor, Any]:
    x = made()
    return x, x * torch.ones(8, requires_grad=True)


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a list": lambda x: [x],
    "a view": lambda x: x[1:],
    "a detached tensor": lambda x: x.detach(),
    "its storage": lambda x: x.untyped_storage(),
    "a tensor set to its storage": lambda x: torch.empty(0).set_(x.untyped_storage()),
    "an array": lambda x: x.numpy(),
    "a capsule": lambda x: torch.utils.dlpack.to_dlpack(x),
    "a hook": lambda x: x.requires_grad_().register_hook(lambda grad: x),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_whatever_holds_a_tensor_is_noticed(holder: str) -> None:
    if holder == "an array":
        pytest.importorskip("numpy")
    tensor = made()
    held = HOLDERS[holder](tensor)
    assert not nobody_else_holds(tensor, 1)
    del held


@pytest.mark.parametrize("make", [saved_by_the_graph, input_of_an_operation])
def test_what_the_graph_has_saved_is_noticed(make: Callable[[], tuple[torch.Tensor, Any]]) -> None:
    tensor, held = make()
    assert not nobody_else_holds(tensor, 1)
    assert not is_only_access(tensor)
    del held


def test_a_fresh_result_is_reached_through_itself_alone() -> None:
    tensor = made()
    assert nobody_else_holds(tensor, 1)
    assert is_only_access(tensor)


def test_memory_from_outside_torch_may_have_another_owner(tmp_path: Path) -> None:
    outside = torch.frombuffer(bytearray(32), dtype=torch.float32)
    mapped = torch.from_file(str(tmp_path / "file"), shared=True, size=8)
    shared = made().share_memory_()
    for tensor in (outside, mapped, shared):
        assert not is_only_access(tensor)
    reference = weakref.ref(outside.untyped_storage())  # as telegrad has to memory in which it has received
    assert is_only_access(outside, received=True)
    outside.share_memory_()
    assert not is_only_access(outside, received=True)
    del reference


def test_an_array_that_a_tensor_was_made_of_is_its_owner() -> None:
    numpy = pytest.importorskip("numpy")
    assert not is_only_access(torch.from_numpy(numpy.ones(8)))


def test_a_weak_reference_could_bring_the_tensor_back() -> None:
    tensor = made()
    reference = weakref.ref(tensor)
    assert not is_only_access(tensor)
    assert reference() is tensor


def test_a_weak_reference_could_bring_the_storage_back() -> None:
    tensor = made()
    reference = weakref.ref(tensor.untyped_storage())
    assert not is_only_access(tensor)
    assert reference() is tensor.untyped_storage()
