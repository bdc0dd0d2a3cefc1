"""Who reads a link: the thread that waits; between calls nobody, for a moment; and then the poller, if it must."""

from __future__ import annotations

import operator
import time
from typing import Any

import pytest

from telegrad.testing.group import local_group

CALLS = 100


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_calls_that_follow_each_other_do_not_tell_the_poller_anything(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_group(["a", "b"], transport=transport) as agents:
        a = agents["a"]
        a.call("b", operator.add, (1, 2))
        told, arm = [], a.poller.arm

        def count(item: Any, *, read: bool) -> None:
            told.append(read)
            arm(item, read=read)

        monkeypatch.setattr(a.poller, "arm", count)
        began = time.monotonic()
        for number in range(CALLS):
            assert a.call("b", operator.add, (number, 1)) == number + 1
        # On tcp, a tick may come between two calls: at most one for each delay of an acknowledgement. After it, the
        # poller may be ahead of the thread that waits for some more calls.
        ticks = (time.monotonic() - began) / a.settings.session.ack_delay if transport == "tcp" else 0
        assert len(told) <= (CALLS // 4 if ticks else 0) + 2 + 2 * ticks


def test_the_poller_reads_an_idle_tcp_link_from_the_next_tick_on() -> None:
    with local_group(["a", "b"], transport="tcp") as agents:
        a = agents["a"]
        a.call("b", operator.add, (1, 2))
        channel = a.peers.find("b").outgoing
        assert channel is not None
        deadline = time.monotonic() + 20
        while not channel._armed and time.monotonic() < deadline:
            a.runtime.event().wait(time.monotonic() + 0.005)
        assert channel._armed
        assert a.call("b", operator.add, (1, 2)) == 3


def test_the_poller_does_not_read_an_idle_unix_link() -> None:
    with local_group(["a", "b"]) as agents:
        agents["a"].call("b", operator.add, (1, 2))
        channel = agents["a"].peers.find("b").outgoing
        assert channel is not None
        assert not channel._armed
