"""A call beyond a limit of the callee fails with LimitExceeded, and the next call within it succeeds."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.calls.call import current_served
from telegrad.calls.client import failure_of
from telegrad.default_agent import acting_as, default_agent
from telegrad.errors import BackwardError, LimitExceeded
from telegrad.protocol.peer_limits import PeerLimits
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Simulation
from telegrad.wire.messages import RRefBackwardReq


def run(program: Callable[[Simulation], Any], **limits: float) -> Any:
    """Run a program on worker a of a simulated group whose workers have these limits for each other."""
    settings = AgentSettings(peer_limits=PeerLimits(**limits))
    with Simulation(seed=1, workers=["a", "b", "c"], settings=settings) as sim:

        def main() -> Any:
            with acting_as(sim["a"]):
                result = program(sim)
            assert_nothing_is_held(sim)
            return result

        return sim.run(main)


def assert_nothing_is_held(sim: Simulation) -> None:
    for agent in sim.agents.values():
        assert all(usage == (0, 0) for usage in agent.local.accounts.usage().values())


def wait_on(event_of: Agent, seconds: float) -> None:
    event_of.executor.wait(event_of.runtime.event(), event_of.runtime.now() + seconds)


def pause(seconds: float) -> str:
    """Wait for some virtual time on the callee."""
    wait_on(default_agent(), seconds)
    return "done"


def error_of(future: rpc.Future[Any]) -> Exception | None:
    try:
        future.wait()
    except Exception as error:  # noqa: BLE001 - returned
        return error
    return None


def call_back(depth: int) -> int:
    """Call the caller, which calls back, and so on."""
    if depth == 0:
        return 0
    served = current_served.get()
    assert served is not None
    return 1 + default_agent().call(served.caller, call_back, (depth - 1,))


def test_too_many_calls_per_second_are_refused_until_the_time_that_the_error_names() -> None:
    def program(sim: Simulation) -> None:
        for number in range(3):
            assert sim["a"].call("b", operator.neg, (number,)) == -number
        with pytest.raises(
            LimitExceeded, match=r"retry after .* s, or raise peer_limits \(calls_per_second\)"
        ) as caught:
            sim["a"].call("b", operator.neg, (3,))
        assert (caught.value.worker, caught.value.limit) == ("b", "calls_per_second")
        assert caught.value.retry_after is not None
        sim.sleep(caught.value.retry_after)
        assert sim["a"].call("b", operator.neg, (3,)) == -3
        assert sim["c"].call("b", operator.neg, (4,)) == -4

    run(program, calls_per_second=2, burst=3)


def test_calls_in_progress_are_limited() -> None:
    def program(sim: Simulation) -> None:
        futures = [rpc.rpc_async("b", pause, (1.0,)) for _ in range(5)]
        outcomes = [error_of(future) for future in futures]
        assert [type(outcome) for outcome in outcomes].count(LimitExceeded) == 2
        assert rpc.rpc_sync("b", pause, (0.1,)) == "done"

    run(program, calls=3)


def test_nested_calls_count_too() -> None:
    def program(sim: Simulation) -> None:
        assert rpc.rpc_sync("b", call_back, (6,)) == 6
        with pytest.raises(LimitExceeded, match="calls in progress"):
            rpc.rpc_sync("b", call_back, (12,))

    run(program, calls=4)


def test_functions_that_run_at_once_are_limited_and_the_others_are_queued() -> None:
    def program(sim: Simulation) -> None:
        futures = [rpc.rpc_async("b", operator.neg, (number,)) for number in range(20)]
        assert [future.wait() for future in futures] == [-number for number in range(20)]
        # A function that waits for a nested call does not count, or this would be a deadlock.
        assert rpc.rpc_sync("b", call_back, (9,)) == 9
        pairs = [rpc.rpc_async("b", call_back, (4,)) for _ in range(5)]
        assert [pair.wait() for pair in pairs] == [4] * 5

    run(program, running=1)


def test_a_large_message_is_refused_before_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(sim: Simulation) -> None:
        sizes: list[int] = []
        sim["a"].call("b", operator.neg, (1,))
        channel = sim["b"].peers.find("a").incoming
        assert channel is not None
        allocate = channel.receiver._assembler._allocate
        monkeypatch.setattr(
            channel.receiver._assembler, "_allocate", lambda size: (sizes.append(size), allocate(size))[1]
        )
        with pytest.raises(LimitExceeded, match=r"allows worker 'a' 1,000,000 bytes in one message") as caught:
            sim["a"].call("b", torch.neg, (torch.ones(1_000_000),))
        assert caught.value.retry_after is None
        assert not sizes
        assert sim["a"].call("b", torch.sum, (torch.ones(100_000),)) == 100_000
        assert len(sizes) == 1

    run(program, message_size=1_000_000)


def test_a_reply_that_is_too_large_fails_the_call_on_the_caller() -> None:
    def program(sim: Simulation) -> None:
        with pytest.raises(LimitExceeded, match="worker 'a' allows worker 'b' 1,000,000 bytes in one message"):
            sim["a"].call("b", torch.ones, (1_000_000,))
        assert sim["a"].call("b", operator.neg, (1,)) == -1

    run(program, message_size=1_000_000)


def test_bytes_held_are_limited() -> None:
    def program(sim: Simulation) -> None:
        big = torch.ones(100_000)
        futures = [rpc.rpc_async("b", hold, (big, 1.0)) for _ in range(4)]
        outcomes = [error_of(future) for future in futures]
        assert [type(outcome) for outcome in outcomes].count(LimitExceeded) == 2
        assert rpc.rpc_sync("b", hold, (big, 0.1)) == 100_000

    run(program, bytes_held=1_000_000)


def hold(tensor: torch.Tensor, seconds: float) -> int:
    """Keep a tensor for some virtual time."""
    pause(seconds)
    return len(tensor)


def test_contexts_are_limited_and_leaving_one_makes_room() -> None:
    def program(sim: Simulation) -> None:
        x = torch.ones(3, requires_grad=True)

        def open_another() -> None:
            sim.sleep(1.0)
            with autograd.context(), pytest.raises(LimitExceeded, match="autograd contexts"):
                rpc.rpc_sync("b", torch.sum, (x,))

        second = sim.spawn("a", open_another)
        with autograd.context() as context:
            loss = rpc.rpc_sync("b", torch.sum, (x,))
            sim.sleep(2.0)
            assert second.ended.is_set()
            autograd.backward(context, [loss])
            assert autograd.get_gradients(context)[x].tolist() == [1.0] * 3
        sim.sleep(1.0)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("b", torch.sum, (x,))])
        sim.sleep(1.0)
        assert sim["b"].autograd.debug_info()["num_autograd_contexts"] == 0
        assert sim["b"].autograd.contexts.opened_by(0) == 0

    run(program, contexts=1)


def test_calls_in_one_context_are_limited() -> None:
    def program(sim: Simulation) -> None:
        with autograd.context():
            for _ in range(3):
                rpc.rpc_sync("b", operator.neg, (1,))
            with pytest.raises(LimitExceeded, match="use a new autograd context"):
                rpc.rpc_sync("b", operator.neg, (1,))
        with autograd.context():
            rpc.rpc_sync("b", operator.neg, (1,))
        sim.sleep(1.0)
        assert sim["b"].autograd.debug_info()["num_autograd_contexts"] == 0

    run(program, calls_per_context=3)


@pytest.mark.parametrize("limit", ["calls_per_second", "message_size"])
def test_a_context_ends_on_a_worker_that_refused_all_its_calls(limit: str) -> None:
    def program(sim: Simulation) -> None:
        rpc.rpc_sync("b", operator.neg, (1,))
        with autograd.context():
            with pytest.raises(LimitExceeded):
                rpc.rpc_sync("b", torch.sum, (torch.ones(1000),))
            sim.sleep(1.0)
        with autograd.context():
            rpc.rpc_sync("b", operator.neg, (1,))
            with pytest.raises(LimitExceeded):
                rpc.rpc_sync("b", torch.sum, (torch.ones(1000),))
        sim.sleep(1.0)
        assert sim["b"].autograd.debug_info()["num_autograd_contexts"] == 0

    run(program, **({"calls_per_second": 1, "burst": 1} if limit == "calls_per_second" else {"message_size": 3000}))


def test_gradients_that_are_too_large_fail_their_pass() -> None:
    def program(sim: Simulation) -> None:
        x = torch.ones(1, requires_grad=True)
        with autograd.context() as context:
            wide = rpc.rpc_sync("b", torch.sum, (x,)).expand(1000) * torch.ones(1000)
            autograd.backward(context, [wide.sum()])
            assert autograd.get_gradients(context)[x].item() == 1000
        y = torch.ones(1000, requires_grad=True)
        with autograd.context() as context:
            loss = rpc.rpc_sync("b", torch.sum, (y,))
            with pytest.raises(BackwardError, match="bytes in one message"):
                autograd.backward(context, [loss])
        rpc.rpc_sync("b", operator.neg, (1,))

    settings = AgentSettings(peer_limits={"b": PeerLimits(message_size=3000)})
    with Simulation(seed=1, workers=["a", "b"], settings=settings) as sim:
        sim.run(lambda: _acting(sim, program))


def _acting(sim: Simulation, program: Callable[[Simulation], None]) -> None:
    with acting_as(sim["a"]):
        program(sim)


def test_references_are_limited_and_releasing_one_makes_room() -> None:
    def program(sim: Simulation) -> None:
        held = [rpc.remote("b", operator.neg, (number,)) for number in range(3)]
        refused = rpc.remote("b", operator.neg, (3,))
        with pytest.raises(LimitExceeded, match="release RRefs that are no longer needed"):
            refused.to_here()
        assert [rref.to_here() for rref in held] == [0, -1, -2]
        held.pop().release()
        sim.sleep(1.0)
        assert rpc.remote("b", operator.neg, (4,)).to_here() == -4
        del refused
        for rref in held:
            rref.release()
        sim.sleep(1.0)
        assert sim["b"].references.context.references_of(0) == 0
        assert sim["b"].references.counts()["values"] == 0

    run(program, references=3)


def slow_leaf() -> torch.Tensor:
    pause(1.0)
    return torch.ones((), requires_grad=True)


def test_backward_requests_that_wait_for_their_value_count_as_calls() -> None:
    def program(sim: Simulation) -> None:
        slow = rpc.remote("b", slow_leaf)  # one call
        client = sim["a"].client
        asked = [
            client.ask("b", "backward", lambda number: RRefBackwardReq(number, slow._id, -1, True), 0) for _ in range(5)
        ]
        for call in asked:
            client.wait(call)
        # Until it is known to wait, a request counts twice.
        assert [type(failure_of(call, client._pipeline)) for call in asked] == [type(None)] + [LimitExceeded] * 4
        slow.backward()  # there is room again
        slow.release()
        sim.sleep(1.0)

    run(program, calls=3)


def test_forks_of_a_refused_request_are_given_back() -> None:
    def program(sim: Simulation) -> None:
        mine = rpc.RRef(7)
        theirs = rpc.remote("c", operator.neg, (1,))
        theirs.to_here()
        rpc.rpc_sync("b", len, ([mine, theirs],))
        with pytest.raises(LimitExceeded):
            rpc.rpc_sync("b", len, ([mine, theirs],))
        theirs.release()
        sim.sleep(2.0)
        assert sim["c"].references.counts()["values"] == 0
        assert sim["a"].references.counts()["forks elsewhere"] == 0

    settings = AgentSettings(peer_limits={"a": PeerLimits(calls_per_second=0.001, burst=1)})
    with Simulation(seed=1, workers=["a", "b", "c"], settings=settings) as sim:
        # Only b limits a: c must serve it.
        def main() -> None:
            sim["c"].local.accounts._given = None
            with acting_as(sim["a"]):
                program(sim)

        sim.run(main)


def test_a_refused_call_of_an_ordered_object_does_not_hold_up_the_next() -> None:
    def program(sim: Simulation) -> None:
        actor = rpc.remote("b", list, ordered=True)
        actor.rpc_sync().append(1)
        outcomes = [actor.rpc_async().append(number) for number in range(2, 8)]
        failed = [isinstance(error_of(outcome), LimitExceeded) for outcome in outcomes]
        assert any(failed)
        assert not all(failed)
        sim.sleep(10.0)
        assert len(actor.to_here()) == 1 + failed.count(False)
        actor.release()
        del actor
        sim.sleep(1.0)

    run(program, calls_per_second=2, burst=5)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_messages_of_every_kind_are_refused_over_sockets(transport: str) -> None:
    settings = AgentSettings(peer_limits=PeerLimits(message_size=300_000))
    with local_group(["a", "b"], transport=transport, settings=settings) as group:
        for elements in (1000, 100_000, 1_000_000):
            for value in (torch.ones(elements), "x" * 4 * elements, [torch.ones(1) for _ in range(elements // 100)]):
                size = 4 * elements if not isinstance(value, list) else elements * 2
                if size > 600_000:
                    with pytest.raises(LimitExceeded, match="bytes in one message"):
                        group["a"].call("b", len, (value,))
                elif size < 200_000:
                    assert group["a"].call("b", len, (value,)) == len(value)
        assert group["b"].local.accounts.usage()["a"] == (0, 0)
