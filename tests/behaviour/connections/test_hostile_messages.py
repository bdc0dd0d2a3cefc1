"""What an agent keeps because of messages with valid heads and hostile contents: a bounded amount, until the sender is
lost."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from fuzz.census import held
from fuzz.threadless_agent import B, C, ThreadlessAgent

from telegrad.calls.call import Served
from telegrad.connection.channel import Channel
from telegrad.errors import BackwardError, ProtocolError, WorkerLost
from telegrad.protocol.rref_ids import COUNTER_BITS
from telegrad.rref.ids import incarnation_of
from telegrad.testing.group import local_group
from telegrad.wire.messages import (
    AbortPass,
    AutogradMetadata,
    Cancel,
    Creation,
    Failure,
    ForkInfo,
    PassFailure,
    PassInfo,
    Request,
    RRefAccess,
    RRefBackwardReq,
    RRefForkRequest,
    RRefUserDelete,
)
from telegrad.wire.payload import encode

NOTHING = encode(((), {})).data
A_TAG, B_TAG, C_TAG = 5, incarnation_of(B), incarnation_of(C)
OF_C = (2, C_TAG << COUNTER_BITS | 1000, A_TAG)
"""A reference that worker c has not created on worker a."""
OF_NOBODY = (77, 1, A_TAG)


@pytest.fixture
def agent() -> ThreadlessAgent:
    return ThreadlessAgent()


def leftovers(agent: ThreadlessAgent) -> dict[str, int]:
    found = held(agent.agent)
    return {name: count for name, count in found.items() if count and name not in ("peers", "timers")}


def test_a_backward_request_for_a_value_that_is_not_computed_holds_no_thread_and_no_call(
    agent: ThreadlessAgent,
) -> None:
    agent.deliver("b", RRefForkRequest(OF_C, (1, 1)))
    for call in range(50):
        agent.deliver("b", RRefBackwardReq(call, OF_C, -1, False))  # would raise WouldWait
    assert leftovers(agent) == {"values": 1, "owned": 1, "forks": 1}
    agent.lose("b")
    assert leftovers(agent) == {}


def test_backward_requests_for_values_that_never_come_start_no_threads() -> None:
    with local_group(["a", "b"]) as agents:
        a, b = agents["a"], agents["b"]
        a.call("b", divmod, (1, 1))
        tag = incarnation_of(b.me)
        rref = (0, incarnation_of(a.me) << COUNTER_BITS | 1000, tag)
        a.tell(1, RRefForkRequest(rref, (0, 1)))
        before = threading.active_count()
        for call in range(100):
            a.tell(1, RRefBackwardReq(1_000_000 + call, rref, -1, False))
        a.call("b", divmod, (1, 1))
        assert threading.active_count() < before + 20


def test_a_value_that_was_only_mentioned_is_forgotten_with_the_last_fork(agent: ThreadlessAgent) -> None:
    for number in range(20):
        agent.deliver("b", RRefForkRequest(OF_C, (1, number)))
        agent.deliver("b", RRefUserDelete(OF_C, (1, number)))
    assert leftovers(agent) == {}


def test_a_value_that_was_only_mentioned_is_kept_while_its_creator_waits_for_it(agent: ThreadlessAgent) -> None:
    agent.deliver("c", Request(1, "@telegrad.to_here", 0.0, False, rref_access=RRefAccess(OF_C, "")), NOTHING)
    agent.deliver("b", RRefForkRequest(OF_C, (1, 1)))
    agent.deliver("b", RRefUserDelete(OF_C, (1, 1)))
    agent.deliver("c", Request(2, "builtins:tuple", 0.0, False, creation=Creation(OF_C, (2, 9))), NOTHING)
    assert [type(head).__name__ for head in agent.answers("c")] == ["Reply", "Reply"]


def test_a_reference_of_a_worker_that_does_not_exist_is_refused(agent: ThreadlessAgent) -> None:
    agent.deliver("b", RRefForkRequest(OF_NOBODY, (1, 1)))
    assert leftovers(agent) == {}


def test_a_fetch_of_a_value_that_never_comes_ends_when_it_is_cancelled(agent: ThreadlessAgent) -> None:
    agent.deliver("b", RRefForkRequest(OF_C, (1, 1)))
    access = RRefAccess(OF_C, "")
    for call, (function, args) in enumerate((("@telegrad.to_here", ()), ("@telegrad.method", (str,)))):
        data = encode((args, {})).data
        agent.deliver("b", Request(call, function, 0.0, False, rref_access=access), data)
        assert agent.answers("b") == []
        agent.deliver("b", Cancel(call, ""))
        (answer,) = agent.answers("b")
        assert isinstance(answer, Failure)
        assert "the caller gave no reason" in answer.text
    assert leftovers(agent) == {"values": 1, "owned": 1, "forks": 1}


def test_a_call_that_waits_for_the_owner_of_a_reference_ends_with_its_caller(agent: ThreadlessAgent) -> None:
    fork = ForkInfo(0, (1, B_TAG << COUNTER_BITS | 1, C_TAG), (1, 2), 2)
    agent.deliver("b", Request(1, "builtins:str", 0.0, False, references=(fork,)), NOTHING)
    assert leftovers(agent)["active"] == 1
    agent.lose("b")
    assert "active" not in leftovers(agent)
    agent.lose("c")
    assert leftovers(agent) == {}


def test_a_call_number_that_is_used_twice_breaks_the_protocol(agent: ThreadlessAgent) -> None:
    agent.deliver("b", RRefForkRequest(OF_C, (1, 1)))
    waiting = Request(1, "@telegrad.to_here", 0.0, False, rref_access=RRefAccess(OF_C, ""))
    agent.deliver("b", waiting, NOTHING)
    agent.deliver("b", RRefBackwardReq(1, OF_NOBODY, -1, False))  # dropped, with a warning
    assert agent.answers("b") == []
    with pytest.raises(ProtocolError, match="call 1 twice"):
        agent.deliver("b", waiting, NOTHING)


def test_a_worker_cannot_create_references_in_the_name_of_another(agent: ThreadlessAgent) -> None:
    for rref in (OF_C, OF_NOBODY, (1, 1, A_TAG), (1, B_TAG << COUNTER_BITS | 1, A_TAG + 1)):
        agent.deliver("b", Request(1, "builtins:tuple", 0.0, False, creation=Creation(rref, (1, 1))), NOTHING)
        (answer,) = agent.answers("b")
        assert isinstance(answer, Failure)
        assert "which is not one of its references" in answer.text
    assert leftovers(agent) == {}


def test_failed_passes_of_a_context_do_not_accumulate(agent: ThreadlessAgent) -> None:
    agent.deliver("b", Request(1, "builtins:tuple", 0.0, False, autograd=AutogradMetadata(1 << 48)), NOTHING)
    for number in range(100):
        info = PassInfo(1 << 48, number, False, False, 0)
        agent.deliver("b", AbortPass(info, PassFailure(1, "text", "")))
    assert leftovers(agent)["passes"] == 16
    agent.lose("b")
    assert leftovers(agent) == {}


def test_a_failed_pass_may_name_workers_that_do_not_exist(agent: ThreadlessAgent) -> None:
    agent.deliver("b", Request(1, "builtins:tuple", 0.0, False, autograd=AutogradMetadata(1 << 48)), NOTHING)
    info = PassInfo(1 << 48, 2**64 - 1, False, False, 0)
    agent.deliver("b", AbortPass(info, PassFailure(-7, "text", "a traceback")))
    context = agent.agent.autograd.contexts.get(1 << 48)
    assert context is not None
    failure = context.passes[info.number].failure
    assert isinstance(failure, BackwardError)
    assert failure.worker == "number -7"


@pytest.mark.parametrize("timeout", [-1.0, math.nan, math.inf, -math.inf, 1e308])
def test_a_timeout_that_is_no_time_counts_as_none(agent: ThreadlessAgent, timeout: float) -> None:
    agent.deliver("b", RRefForkRequest(OF_C, (1, 1)))
    access = RRefAccess(OF_C, "")
    agent.deliver("b", Request(1, "@telegrad.to_here", timeout, False, rref_access=access), NOTHING)
    served: Served
    (served,) = agent.agent.server.active.values()
    assert served.deadline is None


def test_the_reason_of_a_cancellation_is_shortened(agent: ThreadlessAgent) -> None:
    for call in range(300):
        agent.deliver("b", Cancel(call, "long\n" * 10_000))
    reasons = agent.agent.server.early_cancels.reasons.values()
    assert len(reasons) == 256
    assert all(len(reason) <= 600 and reason.isprintable() for reason in reasons)
    agent.lose("b")
    assert leftovers(agent) == {}


def test_messages_for_a_worker_that_is_not_connected_take_one_task_together(
    agent: ThreadlessAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, connections = agent.agent.peers, []
    peers.find("b").outgoing = None

    def connect(peer: object, deadline: float | None) -> Channel:
        connections.append(peer)
        peers.find("b").outgoing = agent.outgoing["b"]
        return agent.outgoing["b"]

    monkeypatch.setattr(peers.connector, "channel_to", connect)
    for number in range(50):
        agent.agent.tell(1, RRefForkRequest(OF_C, (1, number)))
    assert len(agent.agent.executor.queue.urgent) == 1
    agent.settle()
    assert len(connections) == 1
    link: Any = agent.outgoing["b"].link
    assert len(link.sent) == 50


def test_messages_for_a_worker_that_cannot_be_reached_are_dropped_and_later_ones_try_again(
    agent: ThreadlessAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, attempts = agent.agent.peers, []
    peers.find("b").outgoing = None

    def refuse(peer: object, deadline: float | None) -> Channel:
        attempts.append(peer)
        raise WorkerLost("it does not listen")

    monkeypatch.setattr(peers.connector, "channel_to", refuse)
    for _ in range(2):
        agent.agent.tell(1, RRefForkRequest(OF_C, (1, 1)))
        agent.agent.tell(1, RRefForkRequest(OF_C, (1, 2)))
        agent.settle()
    assert len(attempts) == 2
