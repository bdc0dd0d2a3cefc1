"""Tensor subclasses keep their type and their autograd edge, or are refused."""

from __future__ import annotations

import copyreg
import pickle
import warnings
from typing import Any

import pytest
import torch
from tests.support.values import carried, sent
from torch import nn
from torch.autograd import forward_ad

from telegrad.errors import PayloadError
from telegrad.wire.payload import decode, encode
from telegrad.wire.subclasses import check_not_dual, is_jagged
from telegrad.wire.tensors import encode_tensors


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


# -- custom reducers and autograd edges


class Extending(torch.Tensor):
    """Extends torch's own reduction, as many libraries do."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol)


class ExtendingState(torch.Tensor):
    """Extends torch's own reduction with more state."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (*super().__reduce_ex__(protocol), {"label": "more"})

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state or {})


class WithReduce(torch.Tensor):
    def __reduce__(self) -> Any:
        return torch.Tensor.__reduce_ex__(self, 2)


class ExtendingParameter(nn.Parameter):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol)


class Doubled(torch.Tensor):
    """Reduced in torch's format, but with the memory of another tensor."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (self.as_subclass(torch.Tensor).detach() * 2).as_subclass(Extending).__reduce_ex__(protocol)


class DoubledParameter(nn.Parameter):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach() * 2).__reduce_ex__(protocol)


class ByPlainTensor(torch.Tensor):
    """Reduced to a plain tensor with the same history, deep in other containers."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _from_nested, ([{"x": (1, self.as_subclass(torch.Tensor))}],)


def _from_nested(nested: Any) -> torch.Tensor:
    x: torch.Tensor = nested[0]["x"][1].as_subclass(ByPlainTensor)
    return x


class ByDerivedTensor(torch.Tensor):
    """Reduced to a tensor that autograd derives from it in several steps."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(torch.Tensor)
        return torch.Tensor.as_subclass, (torch.stack([plain * 2, plain]).exp().log().sum(0) / 3, ByDerivedTensor)


class ByNumbers(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _from_list, (self.tolist(),)


def _from_list(values: Any) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True).as_subclass(ByNumbers)


class ByUnrelatedTensor(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        other = torch.ones(2, requires_grad=True)
        for _ in range(100):
            other = other + 1
        return _from_list, (self.tolist(), other, torch.ones(2, requires_grad=True))


class ByManyParts(torch.Tensor):
    """Reduced to more parts than are searched."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _from_list, (self.as_subclass(torch.Tensor), [0] * 2000)


class ByName(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return "CONSTANT"


CONSTANT = torch.ones(2).as_subclass(ByName)


class LosingHistory(torch.Tensor):
    """Reduced with its history, and restored without."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored_without_history, (self.as_subclass(torch.Tensor),)


def _restored_without_history(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_subclass(LosingHistory, x, True)
    return made


class OwnMemory(torch.Tensor):
    """Handles dispatch itself, and has memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def with_edge(cls: type[torch.Tensor]) -> tuple[torch.Tensor, Any]:
    leaf = torch.ones(2, requires_grad=True)
    return leaf, (leaf * 3).as_subclass(cls)


@pytest.mark.parametrize("cls", [Extending, ExtendingState, WithReduce, ByPlainTensor, ByDerivedTensor])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_custom_reduction_keeps_the_edge(cls: type[torch.Tensor], mode: Any) -> None:
    leaf, x = with_edge(cls)
    with mode():
        encoded = encode([x])
    (y,) = decode(encoded.data, encoded.attachments)  # type: ignore[misc]  # a list
    assert type(y) is cls
    y.as_subclass(torch.Tensor).sum().backward()
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, torch.full((2,), 3.0))


def test_further_state_of_a_standard_reduction_is_kept() -> None:
    _, x = with_edge(ExtendingState)
    x.note = "attribute"
    y = sent(x)
    assert (y.label, y.note) == ("more", "attribute")


@pytest.mark.parametrize("cls", [ByNumbers, ByUnrelatedTensor, ByManyParts])
def test_a_reduction_without_the_history_is_refused_in_a_context(cls: type[torch.Tensor]) -> None:
    _, x = with_edge(cls)
    with pytest.raises(PayloadError, match=rf"a {cls.__name__} that requires grad cannot be sent.*without its history"):
        encode([x])
    leaf = torch.ones(2).as_subclass(cls).requires_grad_()
    with pytest.raises(PayloadError, match="without its history"):
        encode([leaf])
    encode([x.detach()])
    encode([x], edges=False)


def test_a_restored_tensor_without_its_history_is_refused() -> None:
    _, x = with_edge(LosingHistory)
    encoded = encode([x])
    with pytest.raises(PayloadError, match="_restored_without_history restores a received LosingHistory"):
        decode(encoded.data, encoded.attachments)


def test_a_reducer_that_is_registered_with_copyreg_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Registered(torch.Tensor):
        pass

    def reduce(x: Any) -> Any:
        return torch.Tensor.as_subclass, (x.as_subclass(torch.Tensor) * 2, ByPlainTensor)

    monkeypatch.setitem(copyreg.dispatch_table, Registered, reduce)
    leaf, x = with_edge(Registered)
    encoded = encode([x])
    (y,) = decode(encoded.data, encoded.attachments)  # type: ignore[misc]  # a list
    assert type(y) is ByPlainTensor
    assert torch.autograd.grad(y.as_subclass(torch.Tensor).sum(), leaf)[0].tolist() == [6, 6]


def test_a_parameter_with_a_custom_reduction_stays_one_or_gets_the_edge() -> None:
    parameter = ExtendingParameter(torch.ones(2))
    encoded = encode([parameter])
    assert encoded.attachments == [parameter]
    (y,) = decode(encoded.data, [torch.ones(2, requires_grad=True)])  # type: ignore[misc]  # a list
    assert isinstance(y, nn.Parameter)
    edge = torch.ones(2, requires_grad=True) * 2
    assert decode(encoded.data, [edge]) == [edge]


def test_a_standard_reduction_of_other_memory_is_not_replaced_by_the_tensor() -> None:
    x = torch.ones(2).as_subclass(Doubled)
    assert sent([x])[0].as_subclass(torch.Tensor).tolist() == [2, 2]
    assert sent([DoubledParameter(torch.ones(2))], edges=False)[0].tolist() == [2, 2]
    with pytest.raises(PayloadError, match="without its history"):
        encode([with_edge(Doubled)[1]])


def test_a_reduction_to_a_global_name_is_used() -> None:
    assert sent([CONSTANT])[0] is CONSTANT


def test_hooks_of_a_subclass_are_not_sent_and_cause_no_warning() -> None:
    x = torch.ones(2).as_subclass(ByPlainTensor).requires_grad_()
    calls: list[torch.Tensor] = []
    x.register_hook(calls.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (y,) = sent([x])
    y.as_subclass(torch.Tensor).sum().backward()
    assert calls == []


def test_a_subclass_that_handles_dispatch_is_sent_with_its_memory() -> None:
    y = sent([torch.arange(3.0).as_subclass(OwnMemory)])[0]
    assert type(y) is OwnMemory
    with torch._C._DisableTorchDispatch():
        assert y.as_subclass(torch.Tensor).tolist() == [0, 1, 2]


class OtherDevice(torch.Tensor):
    """Pretends to be on another device than its memory."""

    @staticmethod
    def __new__(cls) -> OtherDevice:
        return torch.Tensor._make_wrapper_subclass(cls, (3,), device="meta")

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # that is the point
        return torch.device("cpu")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_a_subclass_whose_memory_cannot_be_accessed_is_refused() -> None:
    x = torch.ones(3)
    torch._C._set_throw_on_mutable_data_ptr(x)  # as torch does for tensors with fake storage
    with pytest.raises(PayloadError, match="OwnMemory cannot be sent: it has no memory of its own"):
        encode([x.as_subclass(OwnMemory)])


def test_a_proxy_for_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(PayloadError, match="OtherDevice cannot be sent: it has no memory of its own"):
        encode([OtherDevice()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_jagged_tensor_keeps_its_edge_through_its_values() -> None:
    leaf = torch.arange(5.0, requires_grad=True)
    x = torch.nested.nested_tensor_from_jagged(leaf * 2, torch.tensor([0, 2, 5]), min_seqlen=2, max_seqlen=3)
    encoded = encode([x])
    assert is_jagged(x)
    (y,) = decode(encoded.data, encoded.attachments)  # type: ignore[misc]  # a list
    assert [part.tolist() for part in y.unbind()] == [[0, 2], [4, 6, 8]]
    y.values().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2] * 5


def test_an_uninitialised_parameter_with_a_custom_reduction_is_refused_in_a_context() -> None:
    class Lazy(nn.UninitializedParameter):
        def __reduce_ex__(self, protocol: Any) -> Any:
            return _from_list, ([1.0],)

    with pytest.raises(PayloadError, match="without its history"):
        encode([Lazy()])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch itself compiles TorchScript for forward-mode AD
def test_a_dual_tensor_is_refused_and_one_without_a_tangent_is_not() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(PayloadError, match=r"the tangent of a Tensor of shape \[2\] would be lost"):
            encode_tensors([dual])
        assert encode_tensors([torch.ones(2), pickle.PickleBuffer(bytearray(3))]).size == 32
        check_not_dual(torch.ones(2))
    check_not_dual(dual)
