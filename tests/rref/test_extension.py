"""References in the arguments and results of calls."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.support.rrefs import (
    Counter,
    Group,
    Holder,
    becomes_true,
    fetch,
    give_back,
    is_owner,
    nothing_is_held,
    own_reference,
)

from telegrad import rpc
from telegrad.calls.extension import Concern, IncomingMessage
from telegrad.default_agent import acting_as
from telegrad.errors import PayloadError, TelegradError, WorkerLost
from telegrad.rref.handle import RRef
from telegrad.wire.messages import ForkInfo


def test_references_can_be_sent_in_arguments_and_results(group: Group) -> None:
    rref = rpc.remote("b", Counter, (5,))
    assert rpc.rpc_sync("c", fetch, (rref,)).count == 5
    assert rpc.rpc_sync("b", is_owner, (rref,))
    back = rpc.rpc_sync("c", give_back, (rref,))
    assert back is not rref
    assert back.to_here().count == 5
    mine = rpc.rpc_sync("b", give_back, (RRef(7),))
    assert mine.is_owner()
    assert mine.local_value() == 7
    assert rpc.rpc_sync("c", own_reference, (3,)).to_here() == 3


def test_references_can_be_sent_in_containers_closures_and_references(group: Group) -> None:
    inner = rpc.remote("c", Counter, (5,))
    assert rpc.rpc_sync("b", give_back, ({"x": [inner, torch.ones(2), inner]},))["x"][2].to_here().count == 5
    assert rpc.rpc_sync("b", give_back, (Holder(inner, torch.ones(2)),)).rref.to_here().count == 5
    outer = rpc.remote("b", give_back, (inner,))
    assert outer.to_here().to_here().count == 5
    again = RRef(outer)
    assert rpc.rpc_sync("c", lambda rref: rref.to_here().to_here().is_owner(), (again,))
    assert rpc.rpc_sync("b", lambda: inner.to_here().count) == 5


def test_a_reference_of_another_agent_in_this_process_cannot_be_sent(group: Group) -> None:
    with acting_as(group["b"]):
        foreign = RRef(1)
    with pytest.raises(TelegradError, match="belongs to worker 'b'"):
        rpc.rpc_sync("c", give_back, (foreign,))


def test_unpicklable_arguments_leak_no_references(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(PayloadError, match="lock"):
            call("c", give_back, ([rref, threading.Lock()],))
    del rref
    assert becomes_true(lambda: nothing_is_held(group))


def test_unpicklable_results_leak_no_references(group: Group) -> None:
    rref = rpc.remote("c", Counter)
    with pytest.raises(PayloadError, match="lock"):
        rpc.rpc_sync("b", lambda rref: [rref, threading.Lock()], (rref,))


def test_a_reference_with_an_unknown_owner_counts_as_lost(group: Group) -> None:

    message = IncomingMessage(group["b"].me, forks=[ForkInfo(3, (1, 0, 0), (1, 0), 99)])
    for extension in group["a"].pipeline.concerned[Concern.REFERENCES]:
        assert extension.arrived(message)
    [(position, handle)] = message.references
    assert position == 3
    with pytest.raises(WorkerLost, match="number 99"):
        handle.to_here()
    assert "number 99" in repr(handle)
