"""Waiting for owners and for the calls that compute values."""

from __future__ import annotations

import threading

import pytest
from tests.support.rrefs import PATIENCE, Counter, Group, add, becomes_true, confirmed, raise_lookup, wait_for

from telegrad import rpc
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError
from telegrad.testing.group import local_group


def test_a_function_starts_when_its_references_are_confirmed(group: Group) -> None:
    rrefs = [rpc.remote(name, Counter) for name in "abc"]
    for name in "abc":
        assert rpc.rpc_sync(name, confirmed, (rrefs,)) == [True] * 3


def test_get_future_is_done_when_the_value_is_computed(group: Group, gate: threading.Event) -> None:
    for owner in "ab":
        rref = rpc.remote(owner, wait_for, ("gate",))
        future = rref._get_future()
        assert not future.done()
        gate.set()
        assert future.wait() is None
        assert rref._get_future().wait() is None
        gate.clear()
        failed = rpc.remote(owner, raise_lookup, ("no",))
        for _ in range(2):
            with pytest.raises(LookupError, match="no"):
                failed._get_future().wait()


def test_get_future_fails_when_the_agent_is_closed_first(gate: threading.Event) -> None:
    with local_group() as group, acting_as(group["a"]):
        future = rpc.remote("b", wait_for, ("gate",))._get_future()
        group["a"].close()
        gate.set()
        with pytest.raises(TelegradError, match="is gone"):
            future.wait(timeout=PATIENCE)


def test_no_other_thread_is_woken_when_a_value_is_computed(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads the reply records it: waking another would cost more than the call."""
    woken: list[object] = []
    monkeypatch.setattr(group["a"].executor, "submit_all", woken.extend)
    for _ in range(5):
        rref = rpc.remote("b", add, (1, 2))
        assert rref.to_here() == 3
        assert becomes_true(rref.confirmed_by_owner)
    assert not woken


def test_callbacks_of_a_creation_future_do_not_block_the_reading_thread(group: Group, gate: threading.Event) -> None:
    rref = rpc.remote("b", wait_for, ("gate",))
    threads: list[threading.Thread] = []
    seen_reading: list[bool] = []

    def call_again(_: object) -> int:
        threads.append(threading.current_thread())
        return rpc.rpc_sync("b", add, (1, 2))  # its reply arrives on the link that is being read

    next_future = rref._get_future().then(call_again)
    peer = group["a"].peers.find("b")

    def open_gate_when_read() -> None:
        assert peer.outgoing is not None
        seen_reading.append(becomes_true(lambda: peer.outgoing.readers.reading))
        gate.set()

    opener = threading.Thread(target=open_gate_when_read)
    opener.start()
    rref.to_here()
    opener.join()
    assert seen_reading == [True]
    assert next_future.wait(PATIENCE) == 3
    assert threading.current_thread() not in threads
