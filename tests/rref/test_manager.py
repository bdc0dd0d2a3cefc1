"""Creating references, and shutting down with references in use."""

from __future__ import annotations

import threading

import pytest
from tests.support.rrefs import Counter, Group, becomes_true, length, nothing_is_held, wait_for

from telegrad import rpc
from telegrad.default_agent import acting_as
from telegrad.errors import DeadlineExceeded, NotInitialized
from telegrad.rref.handle import RRef
from telegrad.testing.group import local_group


def test_a_value_can_be_used_before_the_call_that_creates_it_arrives(group: Group) -> None:
    """A large message is overtaken by small ones."""
    rrefs = [rpc.remote("b", length, (bytes(3_000_000),)) for _ in range(5)]
    assert [rref.to_here() for rref in rrefs] == [3_000_000] * 5
    assert rpc.remote("b", Counter, (7,)).rpc_sync().add() == 8


def test_a_timeout_of_remote_is_raised_when_the_reference_is_used(group: Group, gate: threading.Event) -> None:
    rpc.rpc_sync("b", abs, (-1,))  # connects
    rref = rpc.remote("b", wait_for, ("gate",), timeout=0.02)
    with pytest.raises(DeadlineExceeded):
        rref._get_future().wait()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match=r"RRef\(0:0 on worker 'b'\) has no value"):
            rref.to_here()
    gate.set()


def test_a_reference_cannot_be_used_after_shutdown() -> None:
    with local_group(["a", "b"]) as agents:
        with acting_as(agents["a"]):
            local, remote = RRef(Counter()), rpc.remote("b", Counter)
            remote.to_here()
        agents["a"].close()
        for rref in (local, remote):
            for access in (rref.to_here, rref.rpc_sync().add, rref.backward):
                with pytest.raises(NotInitialized, match=r"worker 'a'.*shut down"):
                    access()
        assert repr(remote) == "RRef(0:1 on worker 'b')"
        assert becomes_true(lambda: nothing_is_held(agents))
