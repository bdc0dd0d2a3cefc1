"""The pickler of torch.distributed.rpc.internal."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from telegrad.drop_in.rpc import internal
from telegrad.drop_in.rpc.internal import (
    PythonUDF,
    RPCExecMode,
    _build_rpc_profiling_key,
    _InternalRPCPickler,
    deserialize,
    run_pickled,
    serialize,
)


class Temperature:
    def __init__(self, degrees: float) -> None:
        self.degrees = degrees


def test_tensors_are_sent_beside_the_bytes() -> None:
    x = torch.ones(3)
    data, tensors = serialize({"x": x, "n": 3})
    assert tensors == [x]
    value = deserialize(data, [x + 1])
    assert value["n"] == 3
    assert torch.equal(value["x"], x + 1)


def test_nested_pickling_keeps_the_tensors_apart() -> None:
    class Nested:
        def __reduce__(self) -> Any:
            data, tensors = serialize(torch.zeros(1))
            return deserialize, (data, tensors)

    first, last = torch.full((1,), 1.0), torch.full((1,), 2.0)
    data, tensors = serialize([first, Nested(), last])
    assert len(tensors) == 3
    assert [x.item() for x in deserialize(data, tensors)] == [1.0, 0.0, 2.0]


def test_a_custom_pickler_can_register_reducers() -> None:
    class Mine(_InternalRPCPickler):
        def __init__(self) -> None:
            super().__init__()
            self._register_reducer(Temperature, lambda value: (Temperature, (value.degrees + 1,)))

    data, tensors = Mine().serialize(PythonUDF(operator.attrgetter("degrees"), (Temperature(1.0),), {}))
    assert run_pickled(data, tensors) == 2.0


def test_a_missing_function_is_an_attribute_error_with_a_remedy() -> None:
    data, tensors = serialize(PythonUDF(Temperature, (1.0,), {}))
    with pytest.raises(AttributeError, match="RPC pickler does not serialize"):
        run_pickled(data.replace(b"Temperature", b"Temperatura"), tensors)


def test_profiling_keys_name_both_workers() -> None:
    assert _build_rpc_profiling_key(RPCExecMode.SYNC, "f", "a", "b") == "rpc_sync#f(a -> b)"


@pytest.mark.usefixtures("agents")
def test_run_function_returns_exceptions_and_handle_exception_raises_them(capsys: pytest.CaptureFixture[str]) -> None:
    failed = internal._run_function(internal.PythonUDF(operator.truediv, (1, 0), {}))
    assert isinstance(failed, internal.RemoteException)
    assert "On WorkerInfo(id=0, name=a)" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError, match="On WorkerInfo"):
        internal._handle_exception(failed)
    assert internal._run_function(internal.PythonUDF(operator.add, (1, 2), {})) == 3
    internal._handle_exception(3)
