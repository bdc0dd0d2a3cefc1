"""Contexts follow into everything that a program does inside them, and end everywhere."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
import torch
from tests.support.one_process import (
    Group,
    assert_as_in_one_process,
    assert_equal,
    gradients_on,
    leaf,
    nothing_left,
    remotely,
)

from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.errors import DeadlineExceeded, TelegradError
from telegrad.protocol.limits import SessionSettings
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group

weights: dict[str, torch.Tensor] = {}


@pytest.fixture(autouse=True)
def fresh() -> None:
    weights.clear()
    weights.update(w=leaf(3, seed=9))


def times_weight(x: torch.Tensor) -> torch.Tensor:
    return x * weights["w"]


# -- nested calls -------------------------------------------------------------------------------------------------


def through(way: list[str], x: torch.Tensor) -> torch.Tensor:
    if not way:
        return times_weight(x)
    result: torch.Tensor = rpc.rpc_sync(way[0], through, (way[1:], x.sin()))
    return result * 2


def through_here(way: list[str], x: torch.Tensor) -> torch.Tensor:
    return times_weight(x) if not way else through_here(way[1:], x.sin()) * 2


@pytest.mark.parametrize("way", [["b", "c"], ["b", "a"], ["b", "c", "b", "a", "c"]])
def test_a_context_follows_into_nested_calls(group: Group, way: list[str]) -> None:
    x = leaf(3)
    assert_as_in_one_process(
        group,
        lambda call: call("b", through if call is remotely else through_here, way[1:], x).sum(),
        [x, weights["w"]],
    )


def asks_c(_: int) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync("c", times_weight, (torch.ones(3, dtype=torch.double),))
    return result


def test_a_context_follows_through_a_call_without_tensors(group: Group) -> None:
    with autograd.context() as context:
        context.backward(remotely("b", asks_c, 1).sum())
        assert_equal(gradients_on(group["c"], context)[weights["w"]], torch.ones(3, dtype=torch.double))


def id_of_context() -> int:
    return autograd._current_context()._context_id()


def test_the_callee_knows_the_context_that_it_runs_in(group: Group) -> None:
    with autograd.context() as context:
        assert remotely("b", id_of_context) == context
    with pytest.raises(TelegradError, match="doesn't have a valid autograd context"):
        remotely("b", id_of_context)


async def awaits(x: torch.Tensor) -> torch.Tensor:
    y = await rpc.rpc_async("c", times_weight, (x.sin(),))
    z = await rpc.rpc_async("c", torch.exp, (y,))
    return z * x


def awaits_here(x: torch.Tensor) -> torch.Tensor:
    return times_weight(x.sin()).exp() * x


def test_a_context_follows_into_coroutines_and_what_they_await(group: Group) -> None:
    x = leaf(3)
    assert_as_in_one_process(
        group, lambda call: call("b", awaits if call is remotely else awaits_here, x).sum(), [x, weights["w"]]
    )


@rpc.functions.async_execution
def answers_later(x: torch.Tensor) -> Any:
    return rpc.rpc_async("c", times_weight, (x.sin(),)).then(lambda future: future.wait().exp() * x)


def test_a_context_follows_into_functions_that_reply_later(group: Group) -> None:
    x = leaf(3)
    assert_as_in_one_process(
        group, lambda call: call("b", answers_later if call is remotely else awaits_here, x).sum(), [x, weights["w"]]
    )


def test_many_calls_at_one_time(group: Group) -> None:
    x = leaf(3)

    def program(call: Any) -> torch.Tensor:
        if call is remotely:
            futures = [rpc.rpc_async("bc"[number % 2], torch.exp, (x * number,)) for number in range(20)]
            return sum(future.wait() * number for number, future in enumerate(futures)).sum()
        return sum((x * number).exp() * number for number in range(20)).sum()

    assert_as_in_one_process(group, program, [x])


def test_calls_of_several_threads_of_one_context(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context, ThreadPoolExecutor(4) as threads:
        parts = [
            threads.submit(copy_context().run, remotely, "bc"[number % 2], torch.exp, x * number)
            for number in range(12)
        ]
        context.backward(sum(part.result() for part in parts).sum())
        assert_equal(context.gradients[x], sum(number * (x * number).exp().detach() for number in range(12)))


def test_a_new_thread_is_in_no_context(group: Group) -> None:
    found: list[bool] = []
    with autograd.context():
        thread = threading.Thread(target=lambda: found.append(autograd._has_valid_context()))
        thread.start()
        thread.join(60)
    assert found == [False]


# -- entering and leaving -----------------------------------------------------------------------------------------


def test_contexts_cannot_be_nested(group: Group) -> None:
    with autograd.context() as context:
        with pytest.raises(TelegradError, match="Already have an autograd context id for this thread"):
            with autograd.context():
                pass
        with pytest.raises(TelegradError, match="Already have an autograd context id for this thread"):
            autograd._new_context()
        assert autograd._current_context()._context_id() == context
    with autograd.context() as other:
        assert other != context


def opens_one() -> None:
    with autograd.context():
        pass


def test_a_callee_cannot_open_a_context_inside_that_of_its_caller(group: Group) -> None:
    remotely("b", opens_one)
    with autograd.context(), pytest.raises(TelegradError, match="Already have an autograd context id"):
        remotely("b", opens_one)


def test_an_error_inside_the_block_ends_the_context(group: Group) -> None:
    ids: list[int] = []

    def fail_inside() -> None:
        with autograd.context() as context:
            ids.append(context)
            remotely("b", torch.exp, leaf(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not autograd._has_valid_context()
    with pytest.raises(TelegradError, match=f"Could not find autograd context with id: {int(ids[0])}"):
        autograd.get_gradients(ids[0])


def test_an_id_is_an_int_with_the_worker_in_its_top_bits(group: Group) -> None:
    for name, agent in group.items():
        with acting_as(agent), autograd.context() as context:
            assert isinstance(context, int)
            assert context >> 48 == agent.me.id
            assert context <= autograd._get_max_id() == (agent.me.id << 48) + 2**48 - 1
            assert remotely("b" if name != "b" else "c", type, context) is int


def test_ids_do_not_repeat(group: Group) -> None:
    ids = set()
    for _ in range(200):
        with autograd.context() as context:
            ids.add(int(context))
    assert len(ids) == 200


def test_autograd_is_available() -> None:
    assert autograd.is_available()


# -- PyTorch's names ----------------------------------------------------------------------------------------------

RECV = "torch::distributed::autograd::RecvRpcBackward"
SEND = "torch::distributed::autograd::SendRpcBackward"


def test_a_send_shows_the_nodes_of_its_tensors(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    with autograd.context() as context:
        result = remotely("b", torch.add, x, y)
        mine = autograd._retrieve_context(context)
        assert mine is autograd._current_context()
        assert mine._context_id() == context
        (send,) = mine._send_functions().values()
        assert send.name() == SEND
        assert [node.name() for node, _ in send.next_functions if node] == ["torch::autograd::AccumulateGrad"] * 2
        assert [node.variable is tensor for (node, _), tensor in zip(send.next_functions, (x, y), strict=True)] == [
            True
        ] * 2
        assert [number for _, number in send.next_functions] == [0, 0]
        assert len(mine._recv_functions()) == 1
        assert result.grad_fn.name() == RECV


def test_the_callees_graph_lies_between_its_send_and_its_recv(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    with autograd.context() as context:
        remotely("b", torch.add, x, y)
        with acting_as(group["b"]):
            theirs = autograd._retrieve_context(context)
        (send,) = theirs._send_functions().values()
        ((add, number),) = send.next_functions
        assert add is not None
        assert (add.name(), number) == ("AddBackward0", 0)
        (one, first), (two, second) = add.next_functions
        assert one is two
        assert one is not None
        assert one.name() == RECV
        assert (first, second) == (0, 1)


def test_a_nested_call_shows_two_sends_that_lead_to_recvs(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    with autograd.context() as context:
        remotely("b", adds_on_c, x, y)
        with acting_as(group["b"]):
            theirs = autograd._retrieve_context(context)
        asked, answered = theirs._send_functions().values()
        assert [node.name() for node, _ in asked.next_functions if node] == [RECV, RECV]
        assert asked.next_functions[0][0] is asked.next_functions[1][0]
        assert [node.name() for node, _ in answered.next_functions if node] == [RECV]
        assert len(theirs._recv_functions()) == 2


def adds_on_c(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync("c", torch.add, (x, y))
    return result


def test_workers_are_known_even_if_no_tensor_required_grad(group: Group) -> None:
    with autograd.context() as context:
        mine = autograd._current_context()
        assert mine._known_worker_ids() == set()
        for worker in ("b", "c"):
            remotely(worker, torch.add, torch.ones(3), 1)
        assert mine._known_worker_ids() == {1, 2}
        assert mine._send_functions() == {}
        with acting_as(group["b"]):
            autograd._is_valid_context(context)
        for worker in ("b", "c"):
            remotely(worker, torch.add, leaf(3), 1)
        assert mine._known_worker_ids() == {1, 2}
        assert len(mine._send_functions()) == 2


def test_a_context_can_be_made_and_released_by_hand(group: Group) -> None:
    x = leaf(3)
    made = autograd._new_context()
    loss = remotely("b", torch.exp, x).sum()
    autograd.backward(made._context_id(), [loss])
    assert_equal(autograd.get_gradients(made._context_id())[x], x.exp().detach())
    assert autograd._get_debug_info()["num_autograd_contexts"] == "1"
    autograd._release_context(made._context_id())
    assert not autograd._has_valid_context()
    with pytest.raises(TelegradError, match="Could not find autograd context"):
        autograd._is_valid_context(made._context_id())


def test_a_context_prints_what_it_holds(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        context.backward(remotely("b", torch.exp, x).sum())
        assert repr(autograd._current_context()) == (
            f"<context {int(context):#x}: 1 sends, 1 recvs, 1 gradients, 0 passes>"
        )


# -- calls that never leave ---------------------------------------------------------------------------------------

hold = threading.Event()


def hold_on() -> None:
    hold.wait(20)


def test_nobody_waits_for_a_call_that_was_never_sent() -> None:
    hold.clear()
    settings = AgentSettings(session=SessionSettings(request_credits=1))
    with local_group(["a", "b"], settings=settings) as agents, acting_as(agents["a"]):
        blocked = rpc.rpc_async("b", hold_on)
        with autograd.context() as context:
            here = agents["a"].autograd.contexts.get(context)
            with pytest.raises(DeadlineExceeded, match="was not sent"):
                rpc.rpc_sync("b", times_weight, (leaf(3),), timeout=0.05)
            assert not here.made
            assert not here._send_functions()
            hold.set()
            blocked.wait()
            rpc.rpc_sync("b", times_weight, (leaf(3),))
            assert agents["b"].autograd.contexts.get(context) is not None
        nothing_left(agents)
