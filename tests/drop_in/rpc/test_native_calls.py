"""Calls in the form of torch's C++: operators, pickled functions and scripts by name."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from telegrad.drop_in import rpc
from telegrad.drop_in.rpc import api, internal
from telegrad.drop_in.rpc.functions import async_execution


@async_execution
def later(x: int) -> Any:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(x + 1)
    return future.then(lambda done: done.wait() * 2)


@pytest.mark.usefixtures("agents")
def test_operators_are_called_by_name() -> None:
    x = torch.ones(2)
    assert api._invoke_rpc_builtin(rpc.get_worker_info("b"), "aten::add", -1.0, x, 1).wait().tolist() == [2, 2]
    rref = api._invoke_remote_builtin(rpc.get_worker_info("b"), "aten::mul", -1.0, x, 3)
    assert rref.to_here().tolist() == [3, 3]
    with pytest.raises(AttributeError, match="no_such_operator"):
        api._invoke_rpc_builtin(rpc.get_worker_info("b"), "aten::no_such_operator", -1.0, x).wait()


@pytest.mark.usefixtures("agents")
def test_pickled_functions_are_called() -> None:
    to = rpc.get_worker_info("b")
    plain = internal.serialize(internal.PythonUDF(operator.add, (1, 2), {}))
    assert api._invoke_rpc_python_udf(to, *plain, -1.0, False).wait() == 3
    assert api._invoke_remote_python_udf(to, *plain, -1.0, False).to_here() == 3
    deferred = internal.serialize(internal.PythonUDF(later, (2,), {}))
    assert api._invoke_rpc_python_udf(to, *deferred, -1.0, True).wait() == 6
    with pytest.raises(RuntimeError, match="must return a torch"):
        api._invoke_rpc_python_udf(to, *plain, -1.0, True).wait()


@pytest.mark.usefixtures("agents")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripts_are_called_by_name() -> None:
    script = torch.jit.script(scripted)  # type: ignore[no-untyped-call]
    x, name = torch.ones(1), script.qualified_name
    assert api._invoke_rpc_torchscript("b", name, (x,), {}, -1.0, False).wait().item() == 2
    assert api._invoke_remote_torchscript("b", name, -1.0, False, x).to_here().item() == 2


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.usefixtures("agents")
def test_invoke_rpc_starts_a_call_of_any_type() -> None:
    future = api._invoke_rpc("b", operator.add, internal.RPCExecMode.SYNC, (1, 2), None)
    assert future.wait() == 3
    assert api._get_should_profile() is False


def test_rrefs_cannot_be_pickled_by_torchscript() -> None:
    with pytest.raises(RuntimeError, match="TorchScript cannot hold telegrad's RRefs"):
        rpc._enable_jit_rref_pickle()
    rpc._disable_jit_rref_pickle()
    rpc._cleanup_python_rpc_handler()
