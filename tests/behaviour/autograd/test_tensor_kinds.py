"""Every kind of tensor that requires grad keeps its edge, or the call raises an error that names its type."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.one_process import Group, all_gradients, assert_equal, leaf, locally, remotely
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from telegrad import autograd
from telegrad.errors import PayloadError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of .* is in prototype stage"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


class Plain(torch.Tensor):
    """A subclass without changes."""


class Extending(torch.Tensor):
    """A subclass that extends torch's pickling, as in many libraries."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol)


class ExtendingMore(torch.Tensor):
    """A subclass with additional state."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (*super().__reduce_ex__(protocol), {"label": "more"})

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state or {})


class WithReduce(torch.Tensor):
    def __reduce__(self) -> Any:
        return torch.Tensor.__reduce_ex__(self, 2)


class ByParts(torch.Tensor):
    """A subclass that is pickled as a plain tensor with its history."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.Tensor.as_subclass, (self.as_subclass(torch.Tensor), ByParts)


class ByValues(torch.Tensor):
    """A subclass that is pickled as numbers."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _from_list, (self.tolist(),)


def _from_list(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.double, requires_grad=True).as_subclass(ByValues)


class Severed(torch.Tensor):
    """A subclass that is pickled with its history, and unpickled without."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _severed, (self.as_subclass(torch.Tensor),)


def _severed(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_subclass(Severed, x, True)
    return made


class Unrelated(torch.Tensor):
    """A subclass that is pickled with an unrelated tensor that requires grad."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unrelated, (self.detach().numpy(), torch.ones(4, dtype=torch.double, requires_grad=True))


def _unrelated(values: Any, other: torch.Tensor) -> torch.Tensor:
    return (torch.from_numpy(values) + other * 0).as_subclass(Unrelated)


class Registered(torch.Tensor):
    """A subclass that is pickled by a function that the program registered."""


def _reduce_registered(x: Registered) -> Any:
    return _registered, (x.tolist(),)


def _registered(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.double, requires_grad=True).as_subclass(Registered)


copyreg.pickle(Registered, _reduce_registered)  # type: ignore[arg-type]  # Any


class OwnParameter(nn.Parameter):
    pass


class ExtendingParameter(nn.Parameter):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol)


class Opaque(torch.Tensor):
    """A wrapper subclass that cannot be flattened."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = [x.inner if isinstance(x, Opaque) else x for x in args]
        result = func(*unwrapped, **(kwargs or {}))
        return Opaque(result) if isinstance(result, torch.Tensor) else result


class Rewrap(torch.autograd.Function):
    """A wrapper subclass whose gradient is that of the wrapped tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return make(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        inner = getattr(grad, "a", getattr(grad, "inner", grad))
        return inner, None


def wrapped(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def wrap(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Rewrap.apply(x, make)  # type: ignore[no-untyped-call]  # torch's
        return result

    return wrap


def total(x: torch.Tensor) -> torch.Tensor:
    """Return a plain scalar made of a tensor of any kind."""
    if x.layout is torch.jagged:
        x = x.values()
    elif x.is_nested:
        x = x.to_padded_tensor(0.0)
    elif x.layout is not torch.strided:
        x = x.to_dense()
    elif type(x) is not torch.Tensor and not isinstance(x, nn.Parameter) and hasattr(x, "as_subclass"):
        x = x if isinstance(x, TwoTensor | Opaque) else x.as_subclass(torch.Tensor)
    x = x.abs() * x.abs() if x.is_complex() else x * x
    return x.sum() * 3


def jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(x.view(4, 1), torch.tensor([0, 1, 4]))


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x * 1,
    "subclass": lambda x: x.as_subclass(Plain),
    "subclass that extends torch's reduce_ex": lambda x: x.as_subclass(Extending),
    "subclass that extends it by a state": lambda x: x.as_subclass(ExtendingMore),
    "subclass with a reduce": lambda x: x.as_subclass(WithReduce),
    "subclass by its parts": lambda x: x.as_subclass(ByParts),
    "view": lambda x: x[1:],
    "conjugated": lambda x: torch.complex(x, x).conj(),
    "negated": lambda x: torch.complex(x, x * 2).conj().imag,
    "complex": lambda x: torch.complex(x, x),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "zero-dimensional": lambda x: x.sum(),
    "sparse coo": lambda x: x.view(2, 2).to_sparse(),
    "sparse csr": lambda x: x.view(2, 2).to_sparse_csr(),
    "sparse csc": lambda x: x.view(2, 2).to_sparse_csc(),
    "sparse bsr": lambda x: x.view(2, 2).to_sparse_bsr((1, 1)),
    "jagged": jagged,
    "jagged, transposed": lambda x: jagged(x).transpose(1, 2),
    "jagged with holes": lambda x: torch.nested.nested_tensor_from_jagged(
        x.view(4, 1), torch.tensor([0, 2, 4]), torch.tensor([1, 2])
    ),
}
"""Kinds of tensors that keep their edge, each made of a plain tensor."""

REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "subclass by its values": (lambda x: x.as_subclass(ByValues), "ByValues"),
    "subclass that loses its edge there": (lambda x: x.as_subclass(Severed), "Severed"),
    "subclass with some other tensor": (lambda x: x.as_subclass(Unrelated), "Unrelated"),
    "registered subclass": (lambda x: x.as_subclass(Registered), "Registered"),
    "wrapper": (wrapped(lambda x: TwoTensor(x, x)), "TwoTensor"),
    "opaque wrapper": (wrapped(Opaque), "Opaque"),
    "nested": (lambda x: torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.strided), "nested tensor"),
    "masked": (lambda x: masked_tensor(x.detach(), x.detach() > 0, requires_grad=True), "MaskedTensor"),
}
"""Kinds that cannot be sent with their edge, and their names in the error."""


@dataclasses.dataclass
class Batch:
    value: torch.Tensor


class Holder:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "by itself": (lambda x: x, lambda value: value),
    "in containers": (lambda x: [{"key": (x,)}], lambda value: value[0]["key"][0]),
    "in a dataclass": (Batch, lambda value: value.value),
    "in an object": (Holder, lambda value: value.value),
}


def total_of(value: Any, way: str) -> torch.Tensor:
    return total(WAYS[way][1](value))


def made_there(x: torch.Tensor, kind: str, way: str) -> Any:
    make = KINDS[kind] if kind in KINDS else REFUSED[kind][0]
    return WAYS[way][0](make(x * 2))


def as_argument(call: Any, x: torch.Tensor, kind: str, way: str) -> torch.Tensor:
    result: torch.Tensor = call("b", total_of, made_there(x, kind, way), way)
    return result


def as_result(call: Any, x: torch.Tensor, kind: str, way: str) -> torch.Tensor:
    return total_of(call("b", made_there, x, kind, way), way)


def one_process(program: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    x.grad = None
    program(locally, x, *args).backward()
    wanted, x.grad = x.grad, None
    assert wanted is not None
    return wanted


@pytest.mark.parametrize("program", [as_argument, as_result])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_any_kind_keeps_its_edge(group: Group, kind: str, program: Any) -> None:
    x = leaf(4)
    wanted = one_process(program, x, kind, "by itself")
    for way in WAYS:
        for mode in (torch.enable_grad, torch.no_grad):
            with autograd.context() as context:
                if program is as_argument and mode is torch.no_grad:
                    value = made_there(x, kind, way)  # a history is kept in any mode
                    with torch.no_grad():
                        value = remotely("b", _itself, value)
                    loss = total_of(value, way)
                else:
                    loss = program(remotely, x, kind, way)
                context.backward(loss)
                assert_equal(all_gradients(group, context).get(x), wanted)


def _itself(value: Any) -> Any:
    return value


@pytest.mark.parametrize("program", [as_argument, as_result])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_that_cannot_keep_its_edge_is_refused_by_name(group: Group, kind: str, program: Any) -> None:
    x = leaf(4)
    for way in WAYS:
        with autograd.context(), pytest.raises(PayloadError, match=REFUSED[kind][1]):
            program(remotely, x, kind, way)
    with autograd.context():
        value = REFUSED[kind][0](x * 2)
        with torch.no_grad(), pytest.raises(PayloadError, match=REFUSED[kind][1]):
            remotely("b", _itself, value)


@pytest.mark.parametrize(
    "kind",
    # Torch itself gives leaves of layouts csc and bsr no gradient.
    [kind for kind in KINDS if kind not in ("sparse csc", "sparse bsr", "jagged, transposed", "jagged with holes")],
)
def test_leaves_of_any_kind_get_their_gradient(group: Group, kind: str) -> None:
    x = KINDS[kind](leaf(4).detach()).detach().requires_grad_()
    total(x).backward()
    wanted, x.grad = x.grad, None
    with autograd.context() as context:
        context.backward(remotely("b", total, x))
        got = context.gradients[x]
    assert wanted is not None
    assert got.layout is wanted.layout
    if got.layout is torch.jagged:
        got, wanted = got.values(), wanted.values()
    assert_equal(got.to_dense().as_subclass(torch.Tensor), wanted.to_dense().as_subclass(torch.Tensor))


@pytest.mark.parametrize("cls", [nn.Parameter, OwnParameter, ExtendingParameter])
def test_parameters_of_any_class_get_their_gradient(group: Group, cls: type[nn.Parameter]) -> None:
    x = cls(leaf(4).detach())
    for value, read in ((x, total), ([x], _first), (Holder(x), _held)):
        with autograd.context() as context:
            context.backward(remotely("b", read, value))
            assert_equal(context.gradients[x], 6 * x.detach())


def _first(values: list[torch.Tensor]) -> torch.Tensor:
    return total(values[0])


def _held(holder: Holder) -> torch.Tensor:
    return total(holder.value)


def test_a_parameter_without_a_shape_is_refused_in_a_context(group: Group) -> None:
    with autograd.context(), pytest.raises(PayloadError, match="UninitializedParameter that requires grad"):
        remotely("b", _itself, nn.UninitializedParameter())


def test_two_jagged_tensors_that_share_offsets_can_be_combined_on_the_receiver(group: Group) -> None:
    x, y, offsets = leaf(4, 1), leaf(4, 1, seed=1), torch.tensor([0, 1, 4])

    def program(call: Any) -> torch.Tensor:
        both = [torch.nested.nested_tensor_from_jagged(part * 1, offsets) for part in (x, y)]
        return total(call("b", torch.mul, *both))

    program(locally).backward()
    with autograd.context() as context:
        context.backward(program(remotely))
        assert_equal(context.gradients[x], x.grad)
        assert_equal(context.gradients[y], y.grad)


@pytest.mark.parametrize("kind", [*KINDS, "subclass by its values", "registered subclass", "wrapper"])
def test_outside_a_context_every_kind_arrives_as_a_value(group: Group, kind: str) -> None:
    x = (KINDS[kind] if kind in KINDS else REFUSED[kind][0])(leaf(4) * 2)
    y = remotely("b", _itself, x)
    assert type(y) is type(x)
    assert float(total(y.detach())) == float(total(x.detach()))


@pytest.mark.parametrize("size", [0, 4])
def test_tensors_inside_function_transforms_are_refused(group: Group, size: int) -> None:
    def send(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = remotely("b", torch.sum, x)
        return result

    x = torch.ones(2, size)
    for run in (
        lambda: torch.vmap(send)(x),
        lambda: torch.func.grad(send)(x),
        lambda: torch.func.jvp(send, (x,), (x,)),
    ):
        with autograd.context(), pytest.raises(PayloadError, match=r"function transform|forward-mode"):
            run()


def test_a_fake_tensor_is_refused(group: Group) -> None:
    with FakeTensorMode():
        x = torch.ones(3, requires_grad=True)
    with autograd.context(), pytest.raises(PayloadError, match="FakeTensor"):
        remotely("b", _itself, x)


def test_meta_tensors_and_empty_tensors_keep_their_edge(group: Group) -> None:
    for x in (torch.ones(3, device="meta", requires_grad=True), torch.ones(0, requires_grad=True)):
        with autograd.context() as context:
            y = remotely("b", torch.mul, x, 2)
            context.backward(y, grad_tensors=[torch.ones_like(y)])
            assert context.gradients[x].shape == x.shape


@pytest.mark.parametrize("in_context", [True, False])
def test_dual_tensors_are_refused_so_that_no_tangent_is_lost(group: Group, in_context: bool) -> None:
    plain = torch.ones(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(plain.clone(), plain * 5)  # type: ignore[no-untyped-call]  # torch's
        for value in (dual, [dual], Holder(dual), dual.as_subclass(Extending), dual[1:], TwoTensor(dual, plain)):
            scope = autograd.context() if in_context else contextlib.nullcontext()
            with scope, pytest.raises(PayloadError, match="dual tensor of forward-mode AD"):
                remotely("b", _itself, value)
        assert remotely("b", torch.neg, plain).tolist() == [-1, -1, -1]


def _make_dual(x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.make_dual(x, x)  # type: ignore[no-untyped-call, no-any-return]  # torch's


def test_a_dual_tensor_whose_level_has_ended_is_sent_as_an_ordinary_one(group: Group) -> None:
    assert remotely("b", _make_dual, torch.ones(2)).tolist() == [1, 1]
