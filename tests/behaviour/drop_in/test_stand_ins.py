"""Torch's private names do what torch's do, or raise an error that says why they cannot."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as, set_default_agent
from telegrad.drop_in import rpc
from telegrad.drop_in.optim.optimizer import (
    _local_optimizer_step,
    _LocalOptimizer,
    _new_local_optimizer,
    _wait_for_all,
)
from telegrad.drop_in.rpc import _utils, api, internal, rref_proxy
from telegrad.drop_in.rpc.agents import TensorPipeAgent, reset_current_agent, set_current_agent
from telegrad.drop_in.rpc.faulty_agent import FaultyTensorPipeRpcBackendOptions, _names_of
from telegrad.drop_in.rpc.functions import async_execution
from telegrad.drop_in.rpc.rref import use_torch_rrefs
from telegrad.errors import TelegradError
from telegrad.testing.faults import Fate, inject
from telegrad.testing.group import local_group
from telegrad.wire.messages import Request


def is_call_of(head: Any, name: str) -> bool:
    return isinstance(head, Request) and head.function.endswith(name)


@pytest.fixture
def agents() -> Iterator[dict[str, Agent]]:
    """Two workers in this process; calls of `neg` that worker a makes are never sent."""
    with local_group(["a", "b"]) as group:
        for agent in group.values():
            use_torch_rrefs(agent)
        inject(group["a"], lambda head: Fate(fails=1) if is_call_of(head, ":neg") else None)
        options = rpc.TensorPipeRpcBackendOptions()
        set_current_agent(TensorPipeAgent(group["a"], HashStore(), options, static=True))
        set_default_agent(group["a"])
        try:
            with acting_as(group["a"]):
                yield group
        finally:
            reset_current_agent()


@async_execution
def later(x: int) -> Any:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(x + 1)
    return future.then(lambda done: done.wait() * 2)


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    @async_execution
    def add_later(self, number: int) -> Any:
        return later(number)


# -- calls as C++ takes them ------------------------------------------------------------------------------------------


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
def test_what_calls_go_through_can_be_called_itself() -> None:
    future = api._invoke_rpc("b", operator.add, internal.RPCExecMode.SYNC, (1, 2), None)
    assert future.wait() == 3
    assert api._get_should_profile() is False


# -- references -------------------------------------------------------------------------------------------------------


def read(serialized: tuple[Any, ...]) -> int:
    counter = rpc.PyRRef._deserialize(serialized)
    return counter.local_value().count if counter.is_owner() else -1


@pytest.mark.usefixtures("agents")
def test_a_reference_can_be_sent_as_what_stands_for_it() -> None:
    counter = rpc.remote("b", Counter, (7,))
    assert rpc.rpc_sync("b", read, (counter._serialize(),)) == 7
    assert internal._InternalRPCPickler._py_rref_receiver(counter._serialize()) is counter
    with pytest.raises(TypeError, match="takes what _serialize"):
        rpc.PyRRef._deserialize((1, 2))
    with pytest.raises(RuntimeError, match="Can not unpickle rref"):
        counter.__setstate__(())


def test_a_pickler_of_a_programs_own_sends_references(agents: dict[str, Agent]) -> None:
    counter = rpc.remote("b", Counter, (7,))

    class Mine(internal._InternalRPCPickler):
        pass

    with api._use_rpc_pickler(Mine()):
        assert rpc.rpc_sync("b", count_of, (counter,)) == 7


def count_of(counter: Any) -> int:
    count: int = counter.local_value().count
    return count


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("to", ["a", "b"])
def test_a_reference_whose_creation_failed_says_so_as_torch_does(to: str) -> None:
    rref = rpc.remote(to, operator.neg, (1,))
    with pytest.raises(RuntimeError, match="was not sent"):
        rref._get_future().wait()
    for use in (rref.to_here, rref._serialize, lambda: rpc.rpc_async("b", read, (rref,))):
        with pytest.raises(RuntimeError, match="RRef creation via rpc"):
            use()
    if to == "a":
        with pytest.raises(RuntimeError, match="RRef creation via rpc"):
            rref.local_value()


def test_so_does_one_to_oneself_whose_creation_timed_out(agents: dict[str, Agent]) -> None:
    blocked = agents["a"].runtime.event()
    agents["a"].register("wait", lambda: agents["a"].executor.wait(blocked, agents["a"].runtime.now() + 60))
    rref = agents["a"].references.create("a", "@wait", (), None, 0.01)
    try:
        for _ in range(2):  # the first waits for it
            with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
                rref.to_here()
    finally:
        blocked.set()


@pytest.mark.usefixtures("agents")
def test_profiling_futures_are_there_if_a_profiler_was_on() -> None:
    with torch.autograd.profiler.profile():
        rref = rpc.remote("b", Counter)
    rref._get_profiling_future().wait()
    with pytest.raises(RuntimeError, match="Profiling future has not been set"):
        rpc.remote("b", Counter)._get_profiling_future()


@pytest.mark.usefixtures("agents")
def test_proxies_can_be_made_for_any_way_to_call() -> None:
    counter = rpc.remote("b", Counter)
    assert rref_proxy.RRefProxy(counter, rpc.rpc_sync).add(1) == 1
    assert rref_proxy.RRefProxy(counter, rpc.rpc_async).add(1).wait() == 2
    assert rref_proxy.RRefProxy(counter, rpc.remote, 10.0).add(1).to_here() == 3
    calls = []

    def mine(to: Any, func: Any, args: Any, timeout: float) -> Any:
        calls.append(to.name)
        return rpc.rpc_sync(to, func, args, timeout=timeout)

    assert rref_proxy.RRefProxy(counter, mine).add(1) == 4
    assert rref_proxy.RRefProxy(counter, mine).add_later(1) == 4
    assert calls == ["b", "b"]


class Held:
    """What a function and the test that calls it, in one process, tell each other."""

    future: torch.futures.Future[int]
    while_running: dict[str, str]

    @staticmethod
    @async_execution
    def answer() -> Any:
        Held.while_running = rpc._get_current_rpc_agent().get_metrics()
        return Held.future.then(lambda done: done.wait())


# -- what a worker tells ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("agents")
def test_metrics_have_torchs_names_and_count() -> None:
    agent = rpc._get_current_rpc_agent()
    idle = {
        "agent.thread_pool_size": "16",
        "agent.num_idle_threads": "16",
        "agent.client_active_calls": "0",
        "agent.server_active_calls": "0",
        "agent.server_active_async_calls": "0",
    }
    assert agent.get_metrics() == agent.get_debug_info() == idle
    Held.future, Held.while_running = torch.futures.Future(), {}
    future = rpc.rpc_async("a", Held.answer)
    while agent.get_metrics()["agent.server_active_async_calls"] == "0":
        agent.agent.executor.wait(agent.agent.runtime.event(), agent.agent.runtime.now() + 0.001)
    assert Held.while_running["agent.num_idle_threads"] == "15"
    assert agent.get_metrics()["agent.client_active_calls"] == "1"
    Held.future.set_result(3)
    assert future.wait() == 3
    while agent.get_metrics() != idle:  # the function is done a moment after its answer has come
        agent.agent.executor.wait(agent.agent.runtime.event(), agent.agent.runtime.now() + 0.001)


def test_an_agent_must_have_what_torchs_has() -> None:
    with pytest.raises(TypeError, match="abstract"):
        rpc.RpcAgent()  # type: ignore[abstract]  # the error is the point


# -- what there is not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda: rpc.RemoteProfilerManager.set_current_profiling_key("key"),
        lambda: rpc._server_process_global_profile().__enter__(),
        lambda: rpc._disable_server_process_global_profiler(),
        lambda: rpc._set_profiler_node_id(1),
        lambda: rpc.enable_gil_profiling(True),
    ],
)
def test_what_is_profiled_elsewhere_is_refused_with_the_reason(use: Any) -> None:
    with pytest.raises(RuntimeError, match="telegrad does not"):
        use()


def test_what_was_never_enabled_can_be_disabled() -> None:
    rpc.enable_gil_profiling(False)
    rpc._disable_jit_rref_pickle()
    rpc._cleanup_python_rpc_handler()
    with rpc._server_process_global_profile(enabled=False):
        pass


@pytest.mark.usefixtures("agents")
def test_other_refusals_say_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="TorchScript cannot hold telegrad"):
        rpc._enable_jit_rref_pickle()
    with pytest.raises(RuntimeError, match="the others learn about it from its connections"):
        _utils._update_group_membership(rpc.get_worker_info("b"), [], {}, True)
    with pytest.raises(ValueError, match="telegrad has no messages SCRIPT_RET"):
        FaultyTensorPipeRpcBackendOptions(1, 1.0, "env://", ["SCRIPT_RET"], {}, 1)


# -- helpers ----------------------------------------------------------------------------------------------------------


def test_turns_at_a_group_are_one_after_the_other() -> None:
    store = HashStore()
    with _utils._group_membership_management(store, "a", True):
        assert store.get("token") == b"a"
    with _utils._group_membership_management(store, "b", False):
        assert store.get("token") == b"b"


@pytest.mark.usefixtures("agents")
def test_an_exception_is_returned_and_raised_as_torchs_helpers_do(capsys: pytest.CaptureFixture[str]) -> None:
    failed = internal._run_function(internal.PythonUDF(operator.truediv, (1, 0), {}))
    assert isinstance(failed, internal.RemoteException)
    assert "On WorkerInfo(id=0, name=a)" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError, match="On WorkerInfo"):
        internal._handle_exception(failed)
    assert internal._run_function(internal.PythonUDF(operator.add, (1, 2), {})) == 3
    internal._handle_exception(3)


@pytest.mark.usefixtures("agents")
def test_a_local_optimizer_steps_on_the_gradients_of_a_context() -> None:
    from telegrad.drop_in import autograd

    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.full((2,), 100.0)
    optimizer = _new_local_optimizer(torch.optim.SGD, [rpc.RRef(weight)], lr=0.1)
    assert isinstance(optimizer.local_value(), _LocalOptimizer)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", torch.mul, (weight, 3)).sum()])
        _local_optimizer_step(optimizer, context_id)
    assert weight.tolist() == pytest.approx([0.7, 0.7])
    assert weight.grad.tolist() == [100, 100]


def test_waiting_for_all_waits_for_all_and_raises_the_first_error() -> None:
    done: list[torch.futures.Future[int]] = [torch.futures.Future() for _ in range(3)]
    done[0].set_result(1)
    done[1].set_exception(TelegradError("first"))
    done[2].set_exception(TelegradError("second"))
    with pytest.raises(TelegradError, match="first"):
        _wait_for_all(done)
    assert _wait_for_all(done[:1]) == [1]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_messages_have_torchs_names() -> None:
    script = torch.jit.script(scripted)  # type: ignore[no-untyped-call]
    from telegrad.wire.torchscript import script_name

    def named(function: str) -> tuple[str, ...]:
        return _names_of(Request(1, function, 0.0, False))

    assert named("torch:add") == named(script_name(script)) == ("SCRIPT_CALL",)
    assert named("operator:add") == named("") == named("@telegrad.method") == ("PYTHON_CALL",)
    assert named("@telegrad.gather") == ()
    assert "SCRIPT_RREF_FETCH_CALL" in named("@telegrad.to_here")
