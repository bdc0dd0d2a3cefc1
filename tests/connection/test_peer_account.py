"""The account of a peer: what is taken is given back once, and errors name worker, limit, value and remedy."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest

from telegrad.connection.peer_account import PeerAccount, PeerAccounts
from telegrad.errors import CallError, LimitExceeded, ProtocolError
from telegrad.protocol.peer_limits import REGISTERED, UNLIMITED, PeerLimits
from telegrad.protocol.peer_usage import MESSAGE_OVERHEAD
from telegrad.settings import AgentSettings
from telegrad.wire.frames import Limits, StoredLimits


class Clock:
    """A runtime whose time the test moves."""

    time = 0.0

    def now(self) -> float:
        return self.time


def account(**limits: float) -> PeerAccount:
    runtime: Any = Clock()
    return PeerAccount("victim", "greedy", PeerLimits(**limits).or_else(UNLIMITED), runtime)


def test_what_is_taken_is_given_back_once() -> None:
    one = account(calls=2)
    first = one.take_call(100, 0, None)
    second = one.take_message(50)
    assert one.usage() == (1, 150 + 2 * MESSAGE_OVERHEAD)
    first.release()
    first.release()
    assert one.usage() == (0, 50 + MESSAGE_OVERHEAD)
    second.release()
    assert one.usage() == (0, 0)


def test_what_nobody_refers_to_any_more_is_given_back() -> None:
    one = account(calls=1)
    one.take_call(100, 0, None)
    gc.collect()
    assert one.usage() == (0, 0)
    held = one.take_call(100, 0, None)
    with pytest.raises(LimitExceeded):
        one.take_call(100, 0, None)
    del held
    one.take_call(100, 0, None).release()


def test_the_bytes_of_an_announced_message_become_those_of_its_call() -> None:
    one = account(calls=1)
    taken = one.take_message(1000)
    call = one.take_call(1000, 0, taken)
    taken.release()
    assert one.usage() == (1, 1000 + MESSAGE_OVERHEAD)
    with pytest.raises(LimitExceeded):
        one.take_call(1000, 0, one.take_message(1000))
    call.release()
    assert one.usage() == (0, 0)


def test_errors_name_worker_limit_value_and_remedy() -> None:
    one = account(message_size=1000, contexts=2, calls_per_second=2, burst=1)
    with pytest.raises(LimitExceeded) as caught:
        one.check_size(5000)
    assert str(caught.value) == (
        "worker 'victim' allows worker 'greedy' 1,000 bytes in one message, and this would be 5,000: send less at "
        "once, or raise peer_limits (message_size) in the options of worker 'victim'"
    )
    with pytest.raises(LimitExceeded) as caught:
        one.check_count("contexts", 3)
    assert "leave autograd contexts that are no longer needed, then retry" in str(caught.value)
    one.take_call(0, 0, None).release()
    with pytest.raises(LimitExceeded, match=r"retry after 0\.5 s") as caught:
        one.take_call(0, 0, None)
    error = caught.value
    assert isinstance(error, CallError)
    assert isinstance(error, ProtocolError)
    assert (error.worker, error.limit, error.retry_after) == ("victim", "calls_per_second", 0.5)


def test_unread_replies_are_checked() -> None:
    one = account(bytes_held=1000)
    one.check_unread(1000)
    with pytest.raises(LimitExceeded, match="read their replies"):
        one.check_unread(1001)
    assert not one.is_stuck(1250)
    assert one.is_stuck(1251)
    assert "1,251 bytes are queued, and its limit is 1,000" in one.unread_reason(1251)


def test_refused_calls_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    one = account(calls=1)
    error = LimitExceeded("too much")
    with caplog.at_level(logging.WARNING, "telegrad"):
        for second in range(130):
            one._runtime.time = float(second)  # type: ignore[attr-defined]  # the runtime is a Clock
            assert one.count_refusal(error) == ""
    assert [record.message for record in caplog.records] == [
        "worker 'victim' refused 1 call of worker 'greedy' since the last line about it; the last: too much",
        "worker 'victim' refused 60 calls of worker 'greedy' since the last line about it; the last: too much",
        "worker 'victim' refused 60 calls of worker 'greedy' since the last line about it; the last: too much",
    ]


def test_a_peer_that_keeps_going_must_be_disconnected() -> None:
    one = account(calls=1)
    reasons = [one.count_refusal(LimitExceeded("too much")) for _ in range(1001)]
    assert not any(reasons[:1000])
    assert reasons[1000] == "it kept exceeding its limits after many refused calls; the last: too much"


def test_large_frames_are_not_stored() -> None:
    assert account(message_size=1000).frame_limits(Limits()) == StoredLimits(64 << 20, 1 << 36, 1 << 20)
    assert account(calls=1).frame_limits(Limits()) == StoredLimits(64 << 20, 1 << 36, 64 << 20)


def test_an_account_belongs_to_a_name_and_only_to_peers_that_have_limits() -> None:
    runtime: Any = Clock()
    assert PeerAccounts("a", AgentSettings(), runtime).of("b") is None
    some = PeerAccounts("a", AgentSettings(peer_limits={"b*": PeerLimits(calls=1)}), runtime)
    assert some.of("b1") is some.of("b1")
    assert some.of("b1") is not some.of("b2")
    assert some.of("c") is None
    registered = PeerAccounts("a", AgentSettings(accept="registered"), runtime)
    one = registered.of("b")
    assert one is not None
    assert one.limits == REGISTERED
    assert registered.of("a") is None, "a worker does not limit itself"
    assert registered.usage() == {"b": (0, 0)}
