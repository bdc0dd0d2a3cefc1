"""A sender that acquires credits stays within its limits, and a receiver notices one that does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import ProtocolError, TelegradError
from telegrad.protocol.credits import Credits
from telegrad.protocol.limits import SessionSettings


def make(requests: int = 1024, size: int = 1 << 20) -> Credits:
    return Credits(SessionSettings(request_credits=requests, request_bytes=size), "b")


def test_requests_are_bounded_by_number() -> None:
    credits = make(requests=2)
    assert credits.acquire(1)
    assert credits.acquire(1)
    assert not credits.acquire(1)
    credits.release(1)
    assert credits.acquire(1)


def test_requests_are_bounded_by_bytes_but_a_larger_one_may_be_sent_alone() -> None:
    credits = make(size=100)
    assert credits.acquire(60)
    assert not credits.acquire(41)
    assert credits.acquire(40)
    credits.release(60)
    credits.release(40)
    assert credits.acquire(1000)
    assert not credits.acquire(1)


def test_credits_in_use_are_counted() -> None:
    credits = make()
    assert credits.acquire(5)
    credits.admit(6)
    credits.admit(7)
    assert credits.in_use() == (1, 2)
    credits.release(5)
    credits.complete(6)
    assert credits.in_use() == (0, 1)


def test_a_request_may_grow_beyond_the_credits_and_holds_up_the_next() -> None:
    credits = make()
    assert credits.acquire(1)
    credits.extend(1 << 40)
    assert not credits.acquire(1)
    credits.release(1 + (1 << 40))
    assert credits.acquire(1)


def test_a_request_beyond_the_credits_is_a_protocol_error() -> None:
    credits = make(requests=1)
    credits.admit(5)
    with pytest.raises(ProtocolError, match="b sent a request of 7 bytes beyond its credits: 1 requests of 5 bytes"):
        credits.admit(7)
    credits.complete(5)
    credits.admit(7)


def test_sent_and_served_requests_are_counted_separately() -> None:
    credits = make(requests=1)
    assert credits.acquire(1)
    credits.admit(1)
    credits.complete(1)
    assert not credits.acquire(1)


def test_a_reply_without_a_request_is_a_protocol_error_of_the_peer_or_a_bug_here() -> None:
    credits = make()
    with pytest.raises(ProtocolError, match="b sent more replies than it got requests"):
        credits.release(1)
    with pytest.raises(TelegradError, match="bug in telegrad") as error:
        credits.complete(1)
    assert not isinstance(error.value, ProtocolError)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 120)), max_size=60))
def test_a_sender_that_acquires_credits_never_exceeds_them(steps: list[tuple[bool, int]]) -> None:
    sender, receiver = make(4, 100), make(4, 100)
    waiting: list[int] = []
    for answer, size in steps:
        if answer and waiting:
            done = waiting.pop(0)
            receiver.complete(done)
            sender.release(done)
        elif sender.acquire(size):
            receiver.admit(size)
            waiting.append(size)
    assert len(waiting) <= 4
    assert len(waiting) <= 1 or sum(waiting) <= 100
