"""Values arrive equal to what was sent, their tensors beside the bytes, and errors name what is in the way."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import math
import operator
import pickle
import subprocess
import sys
import threading
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from telegrad.errors import FunctionNotFound, NotInitialized, PayloadError
from telegrad.wire.function_names import function_name, resolve_function
from telegrad.wire.payload import Encoded, decode, encode
from telegrad.wire.tensors import decode_tensors, encode_tensors


def carried(encoded: Encoded) -> Any:
    """Decode what encode gave, with its attachments by way of a region."""
    layout = encode_tensors(encoded.attachments)
    region = bytearray(layout.size)
    layout.write(region)
    return decode(encoded.data, decode_tensors(layout.descriptors, region))


def sent(value: object, **options: Any) -> Any:
    return carried(encode(value, **options))


# ---- things to send


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    labels: list[torch.Tensor]
    name: str = "b"


class Pair(NamedTuple):
    first: Any
    second: Any


class Slotted:
    __slots__ = ("lock", "value")

    def __init__(self, value: object) -> None:
        self.value = value


class Holder:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def make(cls) -> Holder:
        return cls()

    def method(self) -> Holder:
        return self


class Inheriting(Holder):
    pass


class Tagged(torch.Tensor):
    """A subclass that the user made, and that intercepts every operation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.data_ptr):
            raise AssertionError(f"the subclass saw {func}")
        return super().__torch_function__(func, types, args, kwargs or {})


class WithOwnReduce(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.as_subclass(torch.Tensor), "by its own reduce")


def _restored(x: torch.Tensor, note: str) -> torch.Tensor:
    y = x.as_subclass(WithOwnReduce)
    y.note = note
    return y


class MyParameter(nn.Parameter):
    pass


class Wrapper(torch.Tensor):
    """A subclass without memory of its own: it consists of two tensors."""

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
    """A wrapper that does not say what it consists of."""

    @staticmethod
    def __new__(cls) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def module_level(x: int) -> int:
    return x + 1


# ---- values


class Registered:
    """Pickled by a reducer that the program has registered."""


def _make_registered() -> Registered:
    return Registered()


leaves = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=5),
    st.floats(allow_nan=False),
    st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3]), module_level, Holder]),
    st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.arange(math.prod(shape)).reshape(shape)),
    st.integers(1, 5).map(lambda n: np.arange(n)),
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(lambda x: Holder(x=x), inner),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, torch.Size):
        return bool(a == b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Holder):
        return same(vars(a), vars(b))
    return bool(a == b)


@settings(deadline=None, max_examples=150)
@given(nested)
def test_nested_structures_round_trip(value: object) -> None:
    assert same(value, sent(value))


def test_tensors_are_not_in_the_bytes() -> None:
    encoded = encode(((torch.zeros(1000),), {"y": [torch.zeros(1000)]}))
    assert len(encoded.data) < 200
    assert len(encoded.attachments) == 2
    assert encoded.module_leaves == frozenset()


def test_attachments_are_the_very_tensors_so_that_autograd_can_use_them() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    p = nn.Parameter(torch.ones(2))
    encoded = encode([x, p])
    assert encoded.attachments[0] is x
    assert encoded.attachments[1] is p


def test_one_tensor_twice_is_one_attachment_and_one_object() -> None:
    x = torch.ones(3)
    encoded = encode({"a": x, "b": [x, x], "c": torch.ones(3)})
    assert len(encoded.attachments) == 2
    y = carried(encoded)
    assert y["a"] is y["b"][0] is y["b"][1]
    assert y["a"] is not y["c"]


def test_dataclasses_slots_sets_and_ordered_dicts_arrive() -> None:
    batch = sent(Batch(torch.ones(2), [torch.zeros(1)]))
    assert torch.equal(batch.inputs, torch.ones(2))
    assert torch.equal(batch.labels[0], torch.zeros(1))
    assert torch.equal(sent(Slotted(torch.ones(2))).value, torch.ones(2))
    assert sent({1, 2}) == {1, 2}
    assert sent(collections.OrderedDict(a=1)) == collections.OrderedDict(a=1)


def test_tensors_and_other_buffers_keep_their_order() -> None:
    value = [
        torch.tensor(0),
        np.arange(3),
        torch.tensor(1),
        bytearray(b"x"),
        np.arange(6).reshape(2, 3).T,
        torch.tensor(2),
    ]
    arrived = sent(value)
    assert [int(arrived[i]) for i in (0, 2, 5)] == [0, 1, 2]
    assert (arrived[1] == np.arange(3)).all()
    assert (arrived[4] == value[4]).all()
    assert len(encode(value).attachments) == 5


def test_numpy_arrays_travel_beside_the_bytes_and_stay_writable_or_not() -> None:
    readonly = np.frombuffer(b"abcdefgh" * 100, dtype=np.uint8)
    encoded = encode([np.zeros(1000), readonly, np.zeros((4, 4))[:, ::2]])
    assert len(encoded.data) < 500
    a, b, c = carried(encoded)
    assert a.flags.writeable
    assert not b.flags.writeable
    assert (b == readonly).all()
    assert c.shape == (4, 2)


def test_a_reducer_that_fails_half_way_does_not_shift_the_attachments() -> None:
    value = [torch.tensor(1), lambda: None, torch.tensor(2)]  # plain pickle stops at the lambda, after one tensor
    first, function, last = sent(value)
    assert (int(first), function(), int(last)) == (1, None, 2)


def test_what_the_program_registered_with_copyreg_is_used() -> None:
    copyreg.pickle(Registered, lambda x: (_make_registered, ()))
    try:
        assert isinstance(sent([Registered(), lambda: 1])[0], Registered)
        assert b"_make_registered" in encode(Registered()).data
    finally:
        del copyreg.dispatch_table[Registered]


# ---- tensors that are more than tensors


def test_parameters_arrive_as_parameters() -> None:
    p, frozen = sent([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)])
    assert type(p) is type(frozen) is nn.Parameter
    assert (p.requires_grad, frozen.requires_grad) == (True, False)
    assert p.is_leaf


def test_a_parameter_that_autograd_has_wrapped_stays_wrapped() -> None:
    for original in (nn.Parameter(torch.ones(2)), MyParameter(torch.ones(2))):
        original.note = "kept"
        wrapped = torch.ones(2, requires_grad=True) * 1
        (y,) = decode(encode([original]).data, [wrapped])
        assert y is wrapped
        assert y.note == "kept"


def test_attributes_of_tensors_arrive_also_where_they_lead_back() -> None:
    x = torch.ones(2)
    x.other, x.me = torch.zeros(3), x
    y = sent(x)
    assert y.me is y
    assert torch.equal(y.other, torch.zeros(3))


def test_a_module_buffer_arrives_as_one() -> None:
    y = sent(nn.Buffer(torch.ones(2), persistent=False))
    assert isinstance(y, nn.Buffer)
    assert y.persistent is False


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


def test_a_subclass_that_autograd_has_wrapped_keeps_type_and_edge() -> None:
    leaf = torch.ones(2, requires_grad=True)
    y: Any = decode(encode(torch.ones(2).as_subclass(Tagged)).data, [leaf * 3])
    assert type(y) is Tagged
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3, 3]


def test_a_subclass_with_its_own_reduce_uses_it() -> None:
    y = sent(torch.ones(2).as_subclass(WithOwnReduce))
    assert type(y) is WithOwnReduce
    assert y.note == "by its own reduce"


def test_a_wrapper_travels_as_the_tensors_it_consists_of() -> None:
    y = sent(Wrapper(torch.ones(2), torch.zeros(2)))
    assert type(y) is Wrapper
    assert (y.a.tolist(), y.b.tolist()) == ([1, 1], [0, 0])


def test_a_wrapper_never_loses_a_gradient_silently() -> None:
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


def test_a_wrapper_that_hides_its_contents_is_refused() -> None:
    with pytest.raises(PayloadError, match="no memory of its own"):
        sent(Opaque())


def test_lazy_modules_arrive_uninitialised() -> None:
    arrived = sent(nn.LazyLinear(3))
    assert isinstance(arrived.weight, nn.UninitializedParameter)
    assert arrived(torch.ones(1, 2)).shape == (1, 3)


# ---- modules


def test_a_module_arrives_whole_and_its_tensors_are_module_leaves() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 1, bias=False)))
    free = torch.ones(1, requires_grad=True)
    encoded = encode(([free, model], {"free": torch.ones(1)}))
    tensors = [*model.parameters(), *model.buffers()]
    own = {i for i, x in enumerate(encoded.attachments) if any(x is t for t in tensors)}
    assert encoded.module_leaves == own
    assert len(own) == len(tensors)
    arrived = carried(encoded)[0][1].eval()
    x = torch.randn(4, 2)
    assert torch.equal(arrived(x), model.eval()(x))
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in arrived.parameters())


def test_a_parameter_next_to_its_module_is_one_object_wherever_it_stands() -> None:
    model = nn.Linear(2, 2)
    encoded = encode([model.weight, model], edges=False)
    assert len(encoded.attachments) == 2
    assert encoded.module_leaves == {0, 1}
    weight, arrived = carried(encoded)
    assert arrived.weight is weight


@pytest.mark.parametrize(
    "pack",
    [
        lambda model: [model.weight, model],
        lambda model: (model, {"w": (model.weight,)}),
        lambda model: collections.OrderedDict(w=[model.weight], m=model),
        lambda model: Pair(model, Batch(model.weight, [model.weight])),
        lambda model: ({model}, frozenset([model.weight])),
    ],
)
def test_a_parameter_that_is_an_argument_too_is_an_attachment_of_its_own(pack: Any) -> None:
    model = nn.Linear(2, 2)
    encoded = encode(pack(model))
    assert [x is model.weight for x in encoded.attachments].count(True) == 2
    (argument,) = set(range(3)) - encoded.module_leaves
    assert encoded.attachments[argument] is model.weight
    assert type(carried(encoded)) is type(pack(model))


@dataclasses.dataclass(eq=False)
class ModuleOfFields(nn.Module):
    weight: nn.Parameter

    def __post_init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" in self.__dict__:
            super().__setattr__(name, value)


def test_the_fields_of_a_module_that_is_a_dataclass_are_no_arguments() -> None:
    encoded = encode([ModuleOfFields(nn.Parameter(torch.ones(1)))])
    assert encoded.module_leaves == {0}
    assert len(encoded.attachments) == 1


def test_a_list_that_contains_itself_and_a_module_arrives() -> None:
    model = nn.Linear(2, 2)
    cycle: list[Any] = [model]
    cycle.append(cycle)
    arrived = sent(cycle)
    assert arrived[1] is arrived


def test_an_optimizer_that_is_sent_with_its_module_still_steps_it() -> None:
    model = nn.LSTM(2, 2)
    arrived, optimizer = sent([model, torch.optim.SGD(model.parameters(), lr=1.0)])
    assert optimizer.param_groups[0]["params"][0] is arrived.weight_ih_l0
    assert arrived._flat_weights[0] is arrived.weight_ih_l0


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    arrived = sent(model)
    assert arrived[0].weight is arrived[1].weight


# ---- what pickle cannot name


def test_lambdas_closures_and_local_classes_go_by_value() -> None:
    scale = torch.tensor(3.0)

    class Local:
        def __init__(self) -> None:
            self.x = scale

    encoded = encode([lambda x: x * scale, Local()])
    assert encoded.attachments == [scale]
    function, local = carried(encoded)
    assert function(2) == 6
    assert local.x == 3


PROGRAM = """
import pickle, sys
import torch
from telegrad.wire.payload import decode, encode
from telegrad.wire.function_names import function_name, resolve_function
state = []
class Mine:
    def add(self): state.append(self)
def function(): return state
by_name, by_value = encode([Mine(), function]), encode([Mine(), function], main_by_name=False)
assert b"cloudpickle" not in by_name.data and b"cloudpickle" in by_value.data
assert decode(by_name.data, [])[1] is function
mixed = encode([Mine, function, lambda: 1])
mine, same, local = decode(mixed.data, [])
assert mine is Mine and same is function and local() == 1
assert function_name(function) == "__main__:function" and resolve_function("__main__:function") is function
assert function_name(function, main_by_name=False) is None
assert function_name(Mine.add) == "__main__:Mine.add" and function_name(Mine.add, main_by_name=False) is None
sys.stdout.write(by_value.data.hex())
"""


def test_what_main_defines_goes_by_name_or_by_value() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    mine, function = decode(bytes.fromhex(done.stdout), [])  # our __main__ is another program
    assert type(mine).__name__ == "Mine"
    assert function() == []


# ---- what cannot be sent


def path_of(value: object, root: str | tuple[str, ...]) -> str:
    with pytest.raises(PayloadError, match="cannot be sent") as caught:
        encode(value, root=root)
    assert caught.value.__cause__ is not None
    return str(caught.value).split(" cannot be sent")[0]


def test_errors_name_the_smallest_part_that_cannot_be_sent() -> None:
    lock = threading.Lock()
    call = ("args", "kwargs")
    assert path_of(((lock,), {}), call) == "args[0]"
    assert path_of(((1, [2, {"k": lock}]), {}), call) == "args[1][1]['k']"
    assert path_of(((1,), {"model": Holder(x=1, lock=lock)}), call) == "kwargs['model'].lock"
    assert path_of({"x": [1, 2, 3, lock]}, "result") == "result['x'][3]"
    assert path_of(Holder(inner=Pair(1, lock)), "result") == "result.inner[1]"
    slotted = Slotted(1)
    slotted.lock = lock
    assert path_of([slotted], "result") == "result[0].lock"
    assert path_of(lock, "result") == "result"


def test_the_error_says_what_pickle_said() -> None:
    with pytest.raises(
        PayloadError, match=r"^args\[0\] cannot be sent: TypeError: cannot pickle '_thread.lock' object"
    ):
        encode(((threading.Lock(),), {}), root=("args", "kwargs"))


def test_the_search_ends_on_cycles_and_still_finds_the_part() -> None:
    a, b = Holder(), Holder()
    a.b, b.a = b, a
    a.lock = threading.Lock()
    assert path_of([a], "result") == "result[0].lock"
    assert path_of([b], "result") == "result[0].a.lock"


def test_the_search_is_bounded() -> None:
    wide = [*[[i] for i in range(10_000)], threading.Lock()]
    assert path_of(wide, "result") == "result"
    deep: Any = threading.Lock()
    for _ in range(60):
        deep = [deep]
    assert path_of(deep, "result").startswith("result[0][0]")


def test_errors_of_user_code_while_encoding_are_payload_errors_with_a_path() -> None:
    class Broken:
        def __reduce__(self) -> Any:
            raise ValueError("not today")

    assert path_of([1, Broken()], "result") == "result[1]"
    with pytest.raises(PayloadError, match="ValueError: not today"):
        encode(Broken())


class Refusing:
    def __reduce__(self) -> Any:
        raise NotInitialized("no agent")


def _refuse() -> None:
    raise NotInitialized("no agent here")


class RefusingToArrive:
    def __reduce__(self) -> Any:
        return _refuse, ()


def test_our_own_errors_pass_unchanged() -> None:
    with pytest.raises(NotInitialized):
        encode(Refusing())
    with pytest.raises(NotInitialized):
        sent(RefusingToArrive())


# ---- decoding


def test_decoding_names_the_module_or_attribute_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("here_only")
    exec("class Thing: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "here_only", module)
    data = encode(module.Thing()).data
    del module.Thing
    with pytest.raises(PayloadError, match=r"'Thing' on <module 'here_only'") as attribute:
        decode(data, [])
    assert isinstance(attribute.value.__cause__, AttributeError)
    monkeypatch.delitem(sys.modules, "here_only")
    with pytest.raises(PayloadError, match="module 'here_only' cannot be imported") as missing:
        decode(data, [])
    assert isinstance(missing.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("data", [b"", b"\x80\x05", b"garbage", encode([1, "two"]).data[:-3], b"\x80\x05\x97."])
def test_corrupt_bytes_are_payload_errors(data: bytes) -> None:
    with pytest.raises(PayloadError, match="cannot be unpickled"):
        decode(data, [])


def test_data_can_be_a_memoryview() -> None:
    assert decode(memoryview(encode([1]).data), []) == [1]


class MakesTensors:
    """Its __setstate__ sees the state of the thread that decodes."""

    def __init__(self) -> None:
        self.made: torch.Tensor | None = None

    def __setstate__(self, state: object) -> None:
        self.made = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
)
def test_decoding_inherits_nothing_from_the_thread(mode: Any) -> None:
    encoded = encode([MakesTensors(), nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Tagged)])
    with mode():
        thing, parameter, tagged = carried(encoded)
    assert (thing.made.device.type, thing.made.dtype, thing.made.requires_grad) == ("cpu", torch.float32, True)
    assert not any(t.is_inference() or t.is_meta for t in (thing.made, parameter, tagged))
    assert parameter.requires_grad


def test_encoding_works_in_inference_mode() -> None:
    with torch.inference_mode():
        encoded = encode([torch.ones(2), nn.Linear(2, 2)])
    assert carried(encoded)[0].tolist() == [1, 1]


# ---- functions by name


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.add, "torch:add"),
        (torch.nn.functional.relu, "torch.nn.functional:relu"),
        (torch.linalg.inv, "torch._C._linalg:linalg_inv"),
        (torch.Tensor.add, "torch._C:TensorBase.add"),
        (torch.Tensor.backward, "torch._tensor:Tensor.backward"),
        (operator.mul, "_operator:mul"),
        (math.sqrt, "math:sqrt"),
        (len, "builtins:len"),
        (dict.fromkeys, "builtins:dict.fromkeys"),
        (nn.Linear, "torch.nn.modules.linear:Linear"),
        (module_level, f"{__name__}:module_level"),
        (Holder, f"{__name__}:Holder"),
        (Holder.static, f"{__name__}:Holder.static"),
        (Holder.method, f"{__name__}:Holder.method"),
        (Holder.make, f"{__name__}:Holder.make"),
        (Inheriting.make, f"{__name__}:Inheriting.make"),
        (Inheriting.static, f"{__name__}:Holder.static"),
    ],
)
def test_functions_that_can_be_imported_have_a_name_that_leads_back(function: Any, name: str) -> None:
    assert function_name(function) == name
    assert resolve_function(name) == function


@pytest.mark.parametrize(
    "function",
    [lambda: None, Holder().method, nn.Linear(1, 1), [].append, operator.itemgetter(1), torch.ops.aten.add, pickle],
)
def test_what_no_name_leads_to_has_none(function: Any) -> None:
    def local() -> None: ...

    assert function_name(function) is None
    assert function_name(local) is None


def test_a_name_that_was_bound_anew_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = module_level
    assert function_name(original) is not None
    monkeypatch.setattr(sys.modules[__name__], "module_level", lambda x: x)
    assert function_name(original) is None


def test_resolve_imports_what_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert resolve_function("colorsys:rgb_to_hsv")(0, 0, 0) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such.module:f", "cannot import module 'no_such.module'"),
        ("math:no.such", "module 'math' has no 'no.such'"),
        ("math:nothing.__class__", "module 'math' has no"),
        ("math:pi", "is a float"),
        ("math", "must have the form 'module:function'"),
        (":sqrt", "must have the form 'module:function'"),
        ("math:", "must have the form 'module:function'"),
        ("math:a..b", "must have the form 'module:function'"),
        (".math:sqrt", "must have the form 'module:function'"),
        ("math:f.<locals>.g", "must have the form 'module:function'"),
        ("math:sqrt:x", "must have the form 'module:function'"),
        ("", "must have the form 'module:function'"),
    ],
)
def test_resolve_says_what_is_missing(name: str, message: str) -> None:
    with pytest.raises(FunctionNotFound, match=message) as caught:
        resolve_function(name)
    assert caught.value.function == name
