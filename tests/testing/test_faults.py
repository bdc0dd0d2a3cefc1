"""Faults injected into real channels: messages are delayed or fail, and the agent copes or raises."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.autograd import backward, context, get_gradients
from telegrad.default_agent import acting_as
from telegrad.errors import CallError, DeadlineExceeded
from telegrad.protocol.limits import SessionSettings
from telegrad.settings import AgentSettings
from telegrad.testing.faults import Decide, Fate, inject
from telegrad.testing.group import local_group
from telegrad.wire.messages import CleanupAutogradContextReq, Reply, Request, RRefUserDelete

DELAY = 0.05
CREDITS = 16


@contextmanager
def group_with(decide: Decide, transport: str = "tcp") -> Iterator[dict[str, Agent]]:
    """Start workers a and b, with faults on a, and act as worker a."""
    settings = AgentSettings(session=SessionSettings(request_credits=CREDITS))
    with local_group(["a", "b"], transport=transport, settings=settings) as group:
        inject(group["a"], decide)
        with acting_as(group["a"]):
            yield group


def is_call_of(head: Any, name: str) -> bool:
    return isinstance(head, Request) and head.function.endswith(name)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_failed_request_fails_its_call_and_leaks_nothing(transport: str) -> None:
    with group_with(lambda head: Fate(fails=1) if is_call_of(head, ":neg") else None, transport) as group:
        for _ in range(CREDITS):  # two calls each, so more than there are credits
            with pytest.raises(CallError, match="was not sent: its failure was injected"):
                rpc.rpc_sync("b", operator.neg, (1,))
            with pytest.raises(CallError, match="was not sent"):
                rpc.rpc_async("b", operator.neg, (1,)).wait()
        assert rpc.rpc_sync("b", operator.add, (1, 2)) == 3
        assert group["a"].activity() == []


def test_an_rref_whose_creation_failed_raises_on_every_use() -> None:
    with group_with(lambda head: Fate(fails=1) if is_call_of(head, ":neg") else None):
        for to in ("a", "b"):
            rref = rpc.remote(to, operator.neg, (1,))
            with pytest.raises(CallError, match="was not sent"):
                rref._get_future().wait()
            for _ in range(2):
                with pytest.raises(CallError, match="was not sent"):
                    rref.to_here()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_other_requests_overtake_a_delayed_one(transport: str) -> None:
    with group_with(lambda head: Fate(delay=3600.0) if is_call_of(head, ":neg") else None, transport):
        late = rpc.rpc_async("b", operator.neg, (1,))
        assert rpc.rpc_sync("b", operator.add, (1, 2)) == 3
        assert not late.done()
        assert late.cancel()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_delayed_request_arrives_once_after_its_delay(transport: str) -> None:
    ran: list[float] = []
    with group_with(lambda head: Fate(delay=DELAY) if isinstance(head, Request) else None, transport) as group:
        runtime = group["b"].runtime
        group["b"].register("note", lambda: ran.append(runtime.now()))
        started = runtime.now()
        rpc.rpc_sync("b", "@note")
        rpc.rpc_sync("b", operator.neg, (1,))
    assert len(ran) == 1
    assert ran[0] - started >= DELAY


def test_a_delayed_request_misses_its_deadline() -> None:
    with group_with(lambda head: Fate(delay=60.0) if isinstance(head, Request) else None):
        with pytest.raises(DeadlineExceeded):
            rpc.rpc_sync("b", operator.neg, (1,), timeout=0.05)


@pytest.mark.parametrize("times", [1, 3])
def test_other_failed_messages_arrive_over_a_new_connection(times: int) -> None:
    kinds = (CleanupAutogradContextReq, RRefUserDelete)
    failed: list[type] = []

    def decide(head: Any) -> Fate | None:
        if isinstance(head, kinds):
            failed.append(type(head))
            return Fate(fails=times)
        return None

    with group_with(decide) as group:
        channel = group["a"].peers.find("b")
        with context() as context_id:
            x = torch.ones(1, requires_grad=True)
            backward(context_id, [rpc.rpc_sync("b", torch.mul, (x, 3)).sum()])
            assert get_gradients(context_id)[x].item() == 3
            first = channel.outgoing
            assert first is not None
            link = first.link
        rref = rpc.remote("b", operator.neg, (1,))
        assert rref.to_here() == -1
        rref.release()
        owner = group["b"]
        while owner.references.counts()["owned"] or owner.autograd.contexts.get(context_id) is not None:
            owner.executor.wait(owner.runtime.event(), owner.runtime.now() + 0.01)
        assert set(failed) == set(kinds)
        assert channel.outgoing is first  # the same session
        assert first.link is not link
        assert rpc.rpc_sync("b", operator.add, (1, 2)) == 3


def test_faults_that_break_connections_need_a_resumable_transport() -> None:
    with group_with(lambda head: Fate(fails=1) if isinstance(head, CleanupAutogradContextReq) else None, "unix"):
        with pytest.raises(ValueError, match="such faults need tcp"), context():
            rpc.rpc_sync("b", torch.mul, (torch.ones(1, requires_grad=True), 3))


def test_faults_are_injected_before_the_first_call() -> None:
    with group_with(lambda head: None) as group:
        rpc.rpc_sync("b", operator.neg, (1,))
        with pytest.raises(ValueError, match="already has channels"):
            inject(group["a"], lambda head: None)


def test_the_callee_sees_only_its_replies() -> None:
    seen: list[type] = []

    def decide(head: Any) -> None:
        seen.append(type(head))

    with local_group(["a", "b"]) as group:
        inject(group["b"], decide)
        assert group["a"].call("b", operator.neg, (1,)) == -1
    assert seen == [Reply]
