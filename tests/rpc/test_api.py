"""The functions of `telegrad.rpc`, between agents of one process on real sockets."""

from __future__ import annotations

import asyncio
import operator
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.calls.call import Call
from telegrad.default_agent import acting_as
from telegrad.errors import (
    CallCancelled,
    DeadlineExceeded,
    FunctionNotFound,
    NotInitialized,
    PayloadError,
    RemoteError,
    UnknownWorker,
    WorkerLost,
)
from telegrad.futures import Future
from telegrad.protocol.limits import SessionSettings
from telegrad.rpc import api
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group

Group = dict[str, Agent]


@pytest.fixture(params=["unix", "tcp"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    with local_group(["a", "b", "c"], transport=request.param) as agents:
        with acting_as(agents["a"]):
            yield agents
        Signals.go.set()  # or closing the agents would wait for the functions that wait for it


# -- functions that are called ------------------------------------------------------------------------------


class Odd(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(left + right)  # cannot be unpickled from its args
        self.left = left


class Plain(ValueError):
    """Can be unpickled."""


def raise_plain(text: str) -> None:
    raise Plain(text)


def raise_odd() -> None:
    raise Odd(1, 2)


def worker_name() -> str:
    return rpc.get_worker_info().name


def nested(path: list[str]) -> list[str]:
    here = rpc.get_worker_info().name
    return [here, *rpc.rpc_sync(path[0], nested, (path[1:],))] if path else [here]


async def add_later(x: int, y: int) -> int:
    await asyncio.sleep(0)
    return x + y


async def call_and_await(to: str, x: int) -> int:
    return await rpc.rpc_async(to, operator.add, (x, 1)) + await rpc.rpc_async(to, operator.add, (x, 2))


async def wait_forever() -> None:
    Signals.entered.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        Signals.cancelled.set()
        raise


@rpc.functions.async_execution
def add_in_two_steps(to: str, x: int) -> rpc.Future[int]:
    return rpc.rpc_async(to, operator.add, (x, 1)).then(lambda future: future.value() + 10)


class Signals:
    """Events between the caller and the callee, which share a process."""

    go = threading.Event()
    cancelled = threading.Event()
    entered = threading.Event()


@pytest.fixture(autouse=True)
def _fresh_signals() -> Iterator[None]:
    Signals.go, Signals.cancelled, Signals.entered = threading.Event(), threading.Event(), threading.Event()
    yield
    Signals.go.set()


def enter_and_wait() -> str:
    Signals.entered.set()
    assert Signals.go.wait(20)
    return "done"


def wait_in_a_nested_call(to: str) -> object:
    try:
        return rpc.rpc_sync(to, enter_and_wait, timeout=0)
    except (CallCancelled, DeadlineExceeded):  # cancelled by the caller, or by the deadline of the call
        Signals.cancelled.set()
        raise


def remaining_time() -> float | None:
    call = rpc.current_call()
    assert call is not None
    return None if call.deadline is None else call.deadline - time.monotonic()


def caller_name() -> str:
    call = rpc.current_call()
    assert call is not None
    return call.caller


def name_seen_by_the_caller() -> str:
    return rpc.rpc_sync(caller_name(), caller_name)


def remaining_time_over(to: str) -> float | None:
    return rpc.rpc_sync(to, remaining_time, timeout=1000)


# -- calls --------------------------------------------------------------------------------------------------


def test_a_call_returns_what_the_function_returns(group: Group) -> None:
    assert rpc.rpc_sync("b", operator.add, args=(1, 2)) == 3
    assert rpc.rpc_sync("b", dict, kwargs={"x": 1}) == {"x": 1}
    assert rpc.rpc_sync("b", worker_name) == "b"


def test_a_worker_is_named_by_name_id_or_info(group: Group) -> None:
    for to in ("b", 1, rpc.get_worker_info("b"), rpc.WorkerInfo("b", 1)):
        assert rpc.rpc_sync(to, worker_name) == "b"
    assert repr(rpc.get_worker_info("b")) == "WorkerInfo(id=1, name=b)"


def test_a_worker_can_call_itself(group: Group) -> None:
    assert rpc.rpc_sync("a", worker_name) == "a"


def test_an_unknown_worker_is_an_error_that_lists_the_known_ones(group: Group) -> None:
    with pytest.raises(
        UnknownWorker, match=r"no worker named 'nobody'; the workers are 'a' \(0\), 'b' \(1\), 'c' \(2\)"
    ):
        rpc.rpc_sync("nobody", worker_name)
    with pytest.raises(UnknownWorker, match="with id 17"):
        rpc.rpc_sync(17, worker_name)


def test_tensors_arrive_unchanged_small_and_large(group: Group) -> None:
    for count in (0, 3, 10_000, 3_000_000):
        x = torch.randn(count)
        assert torch.equal(rpc.rpc_sync("b", torch.neg, (x,)), -x)


def test_a_large_message_does_not_delay_a_small_one(group: Group) -> None:
    large = rpc.rpc_async("b", torch.neg, (torch.ones(8_000_000),))
    assert rpc.rpc_sync("b", operator.add, (1, 1)) == 2
    assert large.wait().sum() == -8_000_000


def test_lambdas_closures_and_bound_methods_can_be_called(group: Group) -> None:
    n = 5
    assert rpc.rpc_sync("b", lambda x: x + n, (1,)) == 6
    assert rpc.rpc_sync("b", "x-y-z".split, ("-",)) == ["x", "y", "z"]


def test_nested_calls_return_through_many_workers(group: Group) -> None:
    way = ["b", "c", "a", "b", "b", "c"]
    assert rpc.rpc_sync(way[0], nested, (way[1:],)) == way


def test_calls_can_be_nested_two_hundred_deep(group: Group) -> None:
    way = ["b", "a"] * 100
    assert rpc.rpc_sync(way[0], nested, (way[1:],)) == way


def test_calls_from_many_threads_get_their_own_results(group: Group) -> None:
    with ThreadPoolExecutor(8) as pool:

        def one(i: int) -> None:
            assert rpc.rpc_sync("b", operator.mul, (i, i)) == i * i

        with acting_as(group["a"]):
            agent = group["a"]
        list(pool.map(lambda i: agent.call("b", operator.mul, (i, i)) == i * i or pytest.fail(str(i)), range(400)))


def test_a_slow_call_does_not_delay_others(group: Group) -> None:
    slow = [rpc.rpc_async("b", enter_and_wait) for _ in range(4)]
    assert Signals.entered.wait(30)
    for i in range(20):
        assert rpc.rpc_sync("b", operator.add, (i, 1)) == i + 1
    Signals.go.set()
    assert [future.wait() for future in slow] == ["done"] * 4


def test_a_registered_name_can_be_called(group: Group) -> None:
    group["b"].register("greet", lambda name: f"hello {name}")
    assert rpc.rpc_sync("b", "@greet", ("you",)) == "hello you"
    with pytest.raises(FunctionNotFound, match=r"worker 'b' cannot run @gone.*registered: greet"):
        rpc.rpc_sync("b", "@gone")


# -- errors -------------------------------------------------------------------------------------------------


def test_an_error_keeps_its_type_and_shows_the_remote_traceback(group: Group) -> None:
    with pytest.raises(Plain, match="broken") as caught:
        rpc.rpc_sync("b", raise_plain, ("broken",))
    shown = "".join(traceback.format_exception(caught.value))
    assert "on worker 'b'" in shown
    assert "in raise_plain" in shown


def test_an_error_that_cannot_be_unpickled_becomes_a_remote_error_with_its_traceback(group: Group) -> None:
    with pytest.raises(RemoteError, match=r"raised .*Odd on worker 'b': 3") as caught:
        rpc.rpc_sync("b", raise_odd)
    assert caught.value.worker == "b"
    assert "in raise_odd" in caught.value.remote_traceback
    assert caught.value.type_name.endswith("Odd")


def test_an_error_of_a_nested_call_reaches_the_first_caller_with_its_type(group: Group) -> None:
    with pytest.raises(UnknownWorker, match="nowhere"):
        rpc.rpc_sync("b", nested, (["c", "nowhere"],))


def test_a_function_that_the_callee_cannot_import_is_named_in_the_error(group: Group) -> None:
    agent = group["a"]
    with pytest.raises(FunctionNotFound, match=r"worker 'b' cannot run no_such_module:f: .*'no_such_module'"):
        agent.call("b", "no_such_module:f")
    with pytest.raises(FunctionNotFound, match=r"'operator' has no 'gone'"):
        agent.call("b", "operator:gone")


def test_arguments_and_results_that_cannot_be_pickled_are_named_by_their_path(group: Group) -> None:
    with pytest.raises(PayloadError, match=r"kwargs\['model'\]\['lock'\]"):
        rpc.rpc_sync("b", dict, kwargs={"model": {"lock": threading.Lock()}})
    with pytest.raises(PayloadError, match=r"args\[1\]"):
        rpc.rpc_sync("b", operator.add, (1, threading.Lock()))
    with pytest.raises(PayloadError, match=r"result\[0\]"):
        rpc.rpc_sync("b", lambda: [threading.Lock()])
    assert rpc.rpc_sync("b", operator.add, (1, 2)) == 3  # nothing else noticed


# -- deadlines and cancelling -------------------------------------------------------------------------------


def test_a_call_past_its_deadline_fails_and_names_worker_and_function(group: Group) -> None:
    rpc.rpc_sync("b", worker_name)  # so that connecting is not what takes so long
    with pytest.raises(
        DeadlineExceeded, match=r"enter_and_wait on worker 'b' was not answered within [\d.]+ s"
    ) as caught:
        rpc.rpc_sync("b", enter_and_wait, timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.worker == "b"
    with pytest.raises(DeadlineExceeded):
        rpc.rpc_async("b", enter_and_wait, timeout=0.05).wait()


def test_nested_calls_inherit_the_deadline(group: Group) -> None:
    left = rpc.rpc_sync("b", remaining_time_over, ("c",), timeout=30)
    assert 25 < left <= 30
    assert rpc.rpc_sync("b", remaining_time, timeout=0) is None


def test_a_function_knows_the_name_of_its_caller_and_can_call_it(group: Group) -> None:
    assert rpc.rpc_sync("b", caller_name) == "a"
    assert rpc.rpc_sync("b", name_seen_by_the_caller) == "b"


async def fail_in_two_steps() -> None:
    await asyncio.sleep(0)
    raise KeyError("as it is")


def test_the_traceback_of_a_coroutine_begins_with_its_own_lines(group: Group) -> None:
    with pytest.raises(KeyError) as caught:
        rpc.rpc_sync("b", fail_in_two_steps)
    lines = [line for line in str(caught.value.__cause__).splitlines() if line.startswith("  File")]
    assert ["in fail_in_two_steps" in line for line in lines] == [True]


def test_a_negative_timeout_is_refused(group: Group) -> None:
    with pytest.raises(ValueError, match="-1 for the default"):
        rpc.rpc_sync("b", worker_name, timeout=-2)


def test_a_timed_out_call_cancels_its_nested_calls(group: Group) -> None:
    rpc.rpc_sync("b", worker_name)
    for timeout in (0.1, 1, 10):  # until it had the time to begin there
        with pytest.raises(DeadlineExceeded):
            rpc.rpc_sync("b", wait_in_a_nested_call, ("c",), timeout=timeout)
        if Signals.cancelled.wait(2 * timeout):
            break
    assert Signals.cancelled.is_set()


def test_a_cancelled_future_raises_and_the_coroutine_is_cancelled(group: Group) -> None:
    future = rpc.rpc_async("b", wait_forever)
    assert rpc.rpc_sync("b", add_later, (1, 2)) == 3  # the loop runs
    assert Signals.entered.wait(30)
    assert future.cancel()
    assert not future.cancel()
    with pytest.raises(CallCancelled, match="wait_forever on worker 'b'"):
        future.wait()
    assert Signals.cancelled.wait(30)


# -- futures ------------------------------------------------------------------------------------------------


def test_futures_work_with_torch_and_chain(group: Group) -> None:
    futures = [rpc.rpc_async("b", operator.add, (i, 1)) for i in range(5)]
    assert torch.futures.wait_all(futures) == [1, 2, 3, 4, 5]
    assert [f.value() for f in torch.futures.collect_all(futures).wait()] == [1, 2, 3, 4, 5]
    assert futures[0].then(lambda f: f.value() * 10).then(lambda f: f.wait() + 1).wait() == 11
    failing = rpc.rpc_async("b", raise_plain, ("x",))
    with pytest.raises(Plain):
        torch.futures.wait_all([failing, *futures])
    with pytest.raises(Plain):
        failing.then(lambda f: f.value()).wait()


def test_a_timeout_of_wait_does_not_cancel_the_call(group: Group) -> None:
    future = rpc.rpc_async("b", enter_and_wait)
    with pytest.raises(DeadlineExceeded, match=r"is not answered yet"):
        future.wait(timeout=0.05)
    assert not future.done()
    Signals.go.set()
    assert future.wait(timeout=30) == "done"
    assert future.done()


def test_a_future_without_a_call_behaves_like_torchs(group: Group) -> None:
    future: rpc.Future[int] = rpc.Future()
    with pytest.raises(DeadlineExceeded):
        future.wait(timeout=0.01)
    future.set_result(3)
    assert future.wait() == future.value() == 3
    assert not future.cancel()


def test_callbacks_run_on_a_thread_of_the_agent_and_may_call_again(group: Group) -> None:
    seen: list[str] = []
    future = rpc.rpc_async("b", operator.add, (1, 2))

    def call_again(done: torch.futures.Future[int]) -> int:
        seen.append(threading.current_thread().name)
        return group["a"].call("c", operator.add, (done.value(), 10))  # type: ignore[no-any-return]

    assert future.then(call_again).wait(timeout=30) == 13


def test_coroutine_functions_are_served_and_can_await_calls(group: Group) -> None:
    assert rpc.rpc_sync("b", add_later, (1, 2)) == 3
    assert rpc.rpc_sync("b", call_and_await, ("c", 1)) == 5


def test_futures_can_be_awaited_by_the_caller(group: Group) -> None:
    async def main() -> int:
        first, second = await asyncio.gather(
            *(asyncio.ensure_future(_await(rpc.rpc_async("b", operator.add, (i, 1)))) for i in range(2))
        )
        return first + second

    async def _await(future: rpc.Future[int]) -> int:
        return await future

    assert asyncio.run(main()) == 3


def test_a_function_that_returns_a_future_replies_when_it_is_done(group: Group) -> None:
    assert rpc.rpc_sync("b", add_in_two_steps, ("c", 1)) == 12


# -- the group ----------------------------------------------------------------------------------------------


def test_all_gather_and_barrier_work_with_all_workers_and_with_some(group: Group) -> None:
    def take_part(name: str) -> tuple[object, object]:
        with acting_as(group[name]):
            everybody = rpc.all_gather(name.upper())
            rpc.barrier()
            some = rpc.all_gather(1, ["b", 2]) if name != "a" else None
            return everybody, some

    with ThreadPoolExecutor(3) as pool:
        results = dict(zip("abc", pool.map(take_part, "abc"), strict=True))
    assert results["a"] == ({"a": "A", "b": "B", "c": "C"}, None)
    assert results["b"] == ({"a": "A", "b": "B", "c": "C"}, {"b": 1, "c": 1})


def test_a_barrier_that_times_out_names_the_missing_worker(group: Group) -> None:
    def take_part(name: str) -> None:
        with acting_as(group[name]), pytest.raises(DeadlineExceeded, match=r"'c' did not join barrier\(\)"):
            rpc.barrier(timeout=0.1)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take_part, "ab"))


def test_a_barrier_fails_when_a_member_is_lost(group: Group) -> None:
    waiting = rpc.rpc_async("b", rpc.barrier)
    rpc.rpc_sync("b", worker_name)
    group["c"].close()
    with pytest.raises(WorkerLost, match="worker 'c' is gone"):
        waiting.wait(30)


# -- credits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_credits_limit_requests_but_not_replies_and_nested_calls(transport: str) -> None:
    settings = AgentSettings(session=SessionSettings(request_credits=8))
    with local_group(["a", "b"], transport=transport, settings=settings) as agents:
        with acting_as(agents["a"]):
            blocked = [rpc.rpc_async("b", enter_and_wait) for _ in range(8)]
            with pytest.raises(DeadlineExceeded, match="8 requests"):
                rpc.rpc_async("b", operator.add, (1, 2), timeout=0.05)
            # Nested calls need no credits, otherwise two workers could deadlock.
            with acting_as(agents["b"]):
                assert rpc.rpc_sync("a", nested, (["b", "a", "b"],)) == ["a", "b", "a", "b"]
            Signals.go.set()
            assert [future.wait() for future in blocked] == ["done"] * 8
            assert [rpc.rpc_sync("b", operator.add, (i, 1)) for i in range(30)] == list(range(1, 31))


# -- shutdown -----------------------------------------------------------------------------------------------


def test_a_graceful_shutdown_waits_for_calls_in_progress() -> None:
    with local_group(["a", "b", "c"]) as agents:
        future = rpc.Future(agents["a"]).start("b", wait_in_a_nested_call, ("c",), None, None)
        assert Signals.entered.wait(30)
        with ThreadPoolExecutor(3) as pool:
            ends = [pool.submit(agent.shutdown) for agent in agents.values()]
            assert not any(end.done() for end in ends)
            Signals.go.set()
            for end in ends:
                end.result(20)
        assert future.value() == "done"


def test_a_shutdown_that_times_out_names_workers_and_calls() -> None:
    with local_group(["a", "b"]) as agents:
        with pytest.raises(DeadlineExceeded, match=r"worker 'b' has not called shutdown\(\)"):
            agents["a"].shutdown(timeout=0.2)
    with local_group(["a", "b"]) as agents:
        agents["a"].call_async("b", enter_and_wait, on_done=lambda call: None)
        with pytest.raises(DeadlineExceeded, match=r"with calls in flight: call \d+ of .*enter_and_wait on worker 'b'"):
            agents["a"].shutdown(timeout=0.2)
        Signals.go.set()


@pytest.mark.parametrize(("timeout", "error"), [("5", TypeError), (-2, ValueError), (float("nan"), ValueError)])
def test_a_wrong_timeout_of_shutdown_ends_nothing(timeout: Any, error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_group(["a"]) as agents:
        monkeypatch.setattr(api, "process_agent", lambda: agents["a"])
        with pytest.raises(error, match="timeout must be"):
            rpc.shutdown(timeout=timeout)
        assert not agents["a"].closed


def test_shutdown_may_be_called_again_and_after_a_peer_died() -> None:
    with local_group(["a", "b", "c"]) as agents:
        agents["a"].call("b", operator.add, (1, 2))
        agents["c"].close()
        with ThreadPoolExecutor(2) as pool:
            for end in [pool.submit(agents[name].shutdown) for name in "ab"]:
                end.result(20)
        agents["a"].shutdown()
        agents["a"].close()
        with pytest.raises(NotInitialized, match="worker 'a' cannot call: it has been shut down"):
            agents["a"].call("b", operator.add, (1, 2))


def test_shutdown_continues_when_the_coordinator_leaves() -> None:
    with local_group(["a", "b", "c"]) as agents:
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(agents[name].shutdown) for name in "bc"]
            agents["a"].call("b", operator.add, (1, 2))
            agents["a"].close()
            for end in ends:
                end.result(20)


def test_calls_in_progress_fail_when_the_callee_shuts_down() -> None:
    with local_group(["a", "b"]) as agents:
        future = rpc.Future(agents["a"]).start("b", wait_forever, (), None, None)
        agents["a"].call("b", operator.add, (1, 2))
        agents["b"].close()
        with pytest.raises(WorkerLost, match=r"worker 'b' is lost \(it has shut down\).*wait_forever"):
            future.wait(30)
        with pytest.raises(WorkerLost):
            agents["a"].call("b", operator.add, (1, 2))


def test_without_an_agent_every_function_says_to_call_init_rpc() -> None:
    with pytest.raises(NotInitialized, match="init_rpc"):
        rpc.rpc_sync("b", operator.add, (1, 2))
    rpc.shutdown()  # does nothing
    assert rpc.is_available()


class SubclassedFuture(rpc.Future[str]):
    """A future whose class `then` must keep."""


def test_then_returns_a_future_of_the_same_class() -> None:
    future = SubclassedFuture()
    following = future.then(lambda done: done.value().upper())
    assert type(following) is SubclassedFuture
    future.set_result("a")
    assert following.wait() == "A"


def test_on_failure_is_called_for_every_exception_of_a_served_function(group: Group) -> None:
    failures: list[BaseException] = []
    group["b"].server.on_failure = failures.append
    with pytest.raises(Plain):
        rpc.rpc_sync("b", raise_plain, ("x",))
    assert [type(error) for error in failures] == [Plain]


@pytest.mark.parametrize("size", [1000, 10_000_000])
def test_traffic_counts_bytes_sent_and_received(group: Group, size: int) -> None:
    rpc.rpc_sync("b", len, (bytes(1),))  # opens the connection
    before = rpc.traffic()
    assert before.keys() == {"b"}
    rpc.rpc_sync("b", torch.ones, (size,), {"dtype": torch.uint8})
    received = rpc.traffic()["b"].received - before["b"].received
    assert size <= received < size + 1000
    rpc.rpc_sync("b", len, (torch.ones(size, dtype=torch.uint8),))
    sent = rpc.traffic()["b"].sent - before["b"].sent
    assert size <= sent < size + 2000
    with acting_as(group["b"]):
        counts = rpc.traffic()["a"]
        assert (counts.sent > size, counts.received > size) == (True, True)


def test_only_the_call_can_complete_its_future(group: Group) -> None:
    future = rpc.rpc_async("b", operator.add, (1, 2))
    for complete in (lambda: future.set_result(4), lambda: future.set_exception(ValueError("x"))):  # type: ignore[arg-type]  # torch says the type of the result
        with pytest.raises(RuntimeError, match="Future can only be marked completed once"):
            complete()
    assert future.wait() == 3


class RacedFuture(Future[int]):
    """A future that another thread tries to complete while the call completes it."""

    rival: threading.Thread | None = None
    error: RuntimeError | None = None

    def _decode(self, call: Call) -> tuple[int, Exception | None]:
        self.race()
        return super()._decode(call)

    def set_exception(self, result: Exception) -> None:  # type: ignore[override]  # as in Future
        self.rival = None
        self.race()
        super().set_exception(result)

    def race(self) -> None:
        if self.rival is None:
            self.rival = threading.Thread(target=self.complete)
            self.rival.start()
            self.rival.join()

    def complete(self) -> None:
        self.error = None
        try:
            self.set_result(4)
        except RuntimeError as error:
            self.error = error


@pytest.mark.parametrize(
    ("function", "outcome"), [(operator.add, nullcontext()), (operator.truediv, pytest.raises(ZeroDivisionError))]
)
def test_no_other_thread_can_complete_the_future_while_the_call_does(
    group: Group, function: Callable[..., Any], outcome: AbstractContextManager[object]
) -> None:
    future = RacedFuture(group["a"])
    future.start("b", function, (3, 0), None, None)
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(30)
    assert "can only be marked completed once" in str(future.error)
    with outcome:
        assert future.wait() == 3


def test_a_misspelt_name_is_corrected(group: Group) -> None:
    with (
        pytest.raises(UnknownWorker, match=r"no worker named 'worke1'.* Did you mean 'worker1'\?$"),
        local_group(["worker0", "worker1"]) as agents,
        acting_as(agents["worker0"]),
    ):
        rpc.rpc_sync("worke1", len, ([],))
