"""Values round-trip, with their tensors kept out of the pickled bytes."""

from __future__ import annotations

import collections
import copyreg
import math
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.values import Batch, Holder, Pair, Slotted, carried, module_level, sent
from tests.wire.test_subclasses import MyParameter, Tagged
from torch import nn

from telegrad.errors import NotInitialized, PayloadError
from telegrad.wire.payload import decode, encode


class Registered:
    """Pickled by a registered reducer."""


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


def test_attachments_are_the_original_tensors() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    p = nn.Parameter(torch.ones(2))
    encoded = encode([x, p])
    assert encoded.attachments[0] is x
    assert encoded.attachments[1] is p


def test_a_repeated_tensor_is_one_attachment_and_one_object() -> None:
    x = torch.ones(3)
    encoded = encode({"a": x, "b": [x, x], "c": torch.ones(3)})
    assert len(encoded.attachments) == 2
    y = carried(encoded)
    assert y["a"] is y["b"][0] is y["b"][1]
    assert y["a"] is not y["c"]


def test_dataclasses_slots_sets_and_ordered_dicts_round_trip() -> None:
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
    received = sent(value)
    assert [int(received[i]) for i in (0, 2, 5)] == [0, 1, 2]
    assert (received[1] == np.arange(3)).all()
    assert (received[4] == value[4]).all()
    assert len(encode(value).attachments) == 5


def test_numpy_arrays_are_attached_and_keep_their_writeable_flag() -> None:
    readonly = np.frombuffer(b"abcdefgh" * 100, dtype=np.uint8)
    encoded = encode([np.zeros(1000), readonly, np.zeros((4, 4))[:, ::2]])
    assert len(encoded.data) < 500
    a, b, c = carried(encoded)
    assert a.flags.writeable
    assert not b.flags.writeable
    assert (b == readonly).all()
    assert c.shape == (4, 2)


def test_a_failed_attempt_with_plain_pickle_leaves_no_attachments() -> None:
    value = [torch.tensor(1), lambda: None, torch.tensor(2)]  # plain pickle fails at the lambda, after one tensor
    first, function, last = sent(value)
    assert (int(first), function(), int(last)) == (1, None, 2)


def test_reducers_registered_with_copyreg_are_used() -> None:
    copyreg.pickle(Registered, lambda x: (_make_registered, ()))
    try:
        assert isinstance(sent([Registered(), lambda: 1])[0], Registered)
        assert b"_make_registered" in encode(Registered()).data
    finally:
        del copyreg.dispatch_table[Registered]


def test_parameters_stay_parameters() -> None:
    p, frozen = sent([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)])
    assert type(p) is type(frozen) is nn.Parameter
    assert (p.requires_grad, frozen.requires_grad) == (True, False)
    assert p.is_leaf


def test_a_parameter_with_an_edge_keeps_the_edge() -> None:
    for original in (nn.Parameter(torch.ones(2)), MyParameter(torch.ones(2))):
        original.note = "kept"
        with_edge = torch.ones(2, requires_grad=True) * 1
        (y,) = decode(encode([original]).data, [with_edge])
        assert y is with_edge
        assert y.note == "kept"


def test_tensors_keep_their_attributes_even_with_cycles() -> None:
    x = torch.ones(2)
    x.other, x.me = torch.zeros(3), x
    y = sent(x)
    assert y.me is y
    assert torch.equal(y.other, torch.zeros(3))


def test_a_module_buffer_stays_a_buffer() -> None:
    y = sent(nn.Buffer(torch.ones(2), persistent=False))
    assert isinstance(y, nn.Buffer)
    assert y.persistent is False


def test_lazy_modules_stay_uninitialised() -> None:
    received = sent(nn.LazyLinear(3))
    assert isinstance(received.weight, nn.UninitializedParameter)
    assert received(torch.ones(1, 2)).shape == (1, 3)


def test_the_tensors_of_a_module_are_module_leaves() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 1, bias=False)))
    free = torch.ones(1, requires_grad=True)
    encoded = encode(([free, model], {"free": torch.ones(1)}))
    tensors = [*model.parameters(), *model.buffers()]
    own = {i for i, x in enumerate(encoded.attachments) if any(x is t for t in tensors)}
    assert encoded.module_leaves == own
    assert len(own) == len(tensors)
    received = carried(encoded)[0][1].eval()
    x = torch.randn(4, 2)
    assert torch.equal(received(x), model.eval()(x))
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in received.parameters())


def test_without_edges_a_parameter_next_to_its_module_is_one_object() -> None:
    model = nn.Linear(2, 2)
    encoded = encode([model.weight, model], edges=False)
    assert len(encoded.attachments) == 2
    assert encoded.module_leaves == {0, 1}
    weight, received = carried(encoded)
    assert received.weight is weight


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    received = sent(model)
    assert received[0].weight is received[1].weight


def test_lambdas_closures_and_local_classes_are_sent_by_value() -> None:
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


def test_objects_of_main_are_sent_by_name_or_by_value() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    mine, function = decode(bytes.fromhex(done.stdout), [])  # this process has another __main__
    assert type(mine).__name__ == "Mine"
    assert function() == []


class Refusing:
    def __reduce__(self) -> Any:
        raise NotInitialized("no agent")


def _refuse() -> None:
    raise NotInitialized("no agent here")


class RefusingToUnpickle:
    def __reduce__(self) -> Any:
        return _refuse, ()


def test_errors_of_telegrad_are_not_wrapped() -> None:
    with pytest.raises(NotInitialized):
        encode(Refusing())
    with pytest.raises(NotInitialized):
        sent(RefusingToUnpickle())


def test_decoding_names_the_missing_module_or_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_corrupt_bytes_raise_payload_errors(data: bytes) -> None:
    with pytest.raises(PayloadError, match="cannot be unpickled"):
        decode(data, [])


def test_data_can_be_a_memoryview() -> None:
    assert decode(memoryview(encode([1]).data), []) == [1]


class MakesTensors:
    """Creates tensors in __setstate__, in the torch state of the decoding thread."""

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
def test_decoding_ignores_the_torch_state_of_the_thread(mode: Any) -> None:
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


def test_objects_of_main_in_this_process_are_sent_by_name_or_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class Mine: pass\ndef function(): return 1", namespace)
    for name in ("Mine", "function"):
        monkeypatch.setattr(main, name, namespace[name], raising=False)
    value = [main.Mine, main.function, main.Mine()]  # type: ignore[attr-defined]  # set above
    assert b"cloudpickle" not in encode(value).data
    assert b"cloudpickle" in encode(value, main_by_name=False).data
    by_name = decode(encode([*value, lambda: 1]).data, [])
    assert by_name[0] is main.Mine  # type: ignore[index, attr-defined]  # a list
    monkeypatch.delattr(main, "Mine")
    by_value: Any = decode(encode([namespace["Mine"]()]).data, [])
    assert type(by_value[0]).__name__ == "Mine"
