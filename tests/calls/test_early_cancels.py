"""Cancellations that arrive before their calls are remembered, in bounded number, until their caller is gone."""

from __future__ import annotations

from tests.support.channels import FakeAgent, FakeLink, connected_channel

from telegrad.calls.early_cancels import EarlyCancels


def test_a_cancellation_is_taken_once() -> None:
    early, channel = EarlyCancels(), connected_channel(FakeAgent(), FakeLink())
    early.add(channel, 1, "the reason")
    assert (early.take(channel, 2), early.take(channel, 1), early.take(channel, 1)) == ("", "the reason", "")


def test_the_oldest_are_dropped_when_there_are_too_many() -> None:
    early, channel = EarlyCancels(), connected_channel(FakeAgent(), FakeLink())
    for call in range(300):
        early.add(channel, call, str(call))
    assert len(early.reasons) == 256
    assert next(iter(early.reasons.values())) == "44"


def test_nothing_is_kept_of_a_caller_that_is_gone() -> None:
    early, channel, other = EarlyCancels(), *(connected_channel(FakeAgent(), FakeLink()) for _ in range(2))
    early.add(channel, 1, "before")
    early.add(other, 1, "another caller")
    channel.close("it is gone")
    early.forget(channel)
    early.add(channel, 2, "a cancellation that was on its way")
    assert list(early.reasons.values()) == ["another caller"]
