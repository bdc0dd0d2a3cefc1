"""Tensor subclasses keep their type and their autograd edge, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.values import carried, sent
from telegrad.errors import PayloadError
from telegrad.wire.payload import decode, encode


class Tagged(torch.Tensor):
    """A user-defined subclass that intercepts every operation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.data_ptr):
            raise AssertionError(f"the subclass saw {func}")
        return super().__torch_function__(func, types, args, kwargs or {})


class WithOwnReduce(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.as_subclass(torch.Tensor), "by custom reduce")


def _restored(x: torch.Tensor, note: str) -> torch.Tensor:
    y = x.as_subclass(WithOwnReduce)
    y.note = note
    return y


class MyParameter(nn.Parameter):
    pass


class Wrapper(torch.Tensor):
    """A subclass without memory of its own, with two inner tensors."""

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
        made.a, made.b = a, b
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].a, args[0].b)
        raise NotImplementedError(func)

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["a", "b"], "context"

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: object, size: Any, stride: Any) -> Wrapper:
        assert context == "context"
        return Wrapper(inner["a"], inner["b"])


class Opaque(torch.Tensor):
    """A wrapper without __tensor_flatten__."""

    @staticmethod
    def __new__(cls) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_subclasses_keep_their_type_and_attributes() -> None:
    x = torch.arange(6.0).reshape(2, 3).t().as_subclass(Tagged)
    x.unit = torch.tensor(3)
    y = sent(x)
    assert type(y) is Tagged
    assert y.as_subclass(torch.Tensor).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert y.unit == 3
    leaf = sent(torch.ones(2).as_subclass(Tagged).requires_grad_())
    assert (leaf.requires_grad, leaf.is_leaf) == (True, True)
    mine = sent(MyParameter(torch.ones(2)))
    assert type(mine) is MyParameter


def test_a_subclass_with_an_edge_keeps_type_and_edge() -> None:
    leaf = torch.ones(2, requires_grad=True)
    y: Any = decode(encode(torch.ones(2).as_subclass(Tagged)).data, [leaf * 3])
    assert type(y) is Tagged
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3, 3]


def test_a_custom_reduce_is_used() -> None:
    y = sent(torch.ones(2).as_subclass(WithOwnReduce))
    assert type(y) is WithOwnReduce
    assert y.note == "by custom reduce"


def test_a_wrapper_is_sent_as_its_inner_tensors() -> None:
    y = sent(Wrapper(torch.ones(2), torch.zeros(2)))
    assert type(y) is Wrapper
    assert (y.a.tolist(), y.b.tolist()) == ([1, 1], [0, 0])


def test_a_wrapper_that_requires_grad_is_refused() -> None:
    x = Wrapper(torch.ones(2), torch.zeros(2)).requires_grad_()
    with pytest.raises(PayloadError, match=r"Wrapper that requires grad.*\(a, b\)"):
        encode([x])
    with torch.no_grad(), pytest.raises(PayloadError, match="Wrapper that requires grad"):
        encode([x])
    assert sent([x], edges=False)[0].requires_grad
    module = nn.Module()
    module.weight = nn.Parameter(x)
    encoded = encode(module)
    assert encoded.module_leaves == {0, 1}
    assert carried(encoded).weight.requires_grad


def test_a_wrapper_without_flatten_is_refused() -> None:
    with pytest.raises(PayloadError, match="no memory of its own"):
        sent(Opaque())
