"""A failed attempt to open a channel does not block later callers, and a resumed session loses no reply."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.channels import FakeAgent, FakeLink, connected_channel

from telegrad.connection.connector import Connector
from telegrad.connection.worker_record import WorkerRecord
from telegrad.testing.group import local_group
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.packing import pack_small


def test_callers_can_retry_after_a_channel_could_not_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_group(["a", "b"]) as group:
        peers = group["a"].peers
        make = peers.make_channel
        failures = [MemoryError("no memory for a channel")]

        def make_later(*args: Any, **kwargs: Any) -> Any:
            if failures:
                raise failures.pop()
            return make(*args, **kwargs)

        monkeypatch.setattr(peers, "make_channel", make_later)
        with pytest.raises(MemoryError, match="no memory for a channel"):
            group["a"].call("b", operator.add, (1, 2), timeout=20)
        assert group["a"].call("b", operator.add, (1, 2), timeout=20) == 3


def test_replies_that_arrive_together_with_the_welcome_are_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link has read them already, so the poller does not report them."""
    local: Any = FakeAgent()
    local.me = WorkerRecord("a", 0, 1, ())
    local.settings = SimpleNamespace(connect_timeout=30.0)
    local.block = local.unblock = lambda: None
    before, after = FakeLink(), FakeLink()
    channel = connected_channel(local, before, resumable=True)
    lost: Any = before
    channel.link_ended(lost, "the network failed")
    local.events.clear()

    def handshake(*_: object) -> tuple[int, int]:
        after.incoming = [Frame(Kind.MESSAGE, 1, 0, 0, bytes(pack_small(b"reply", b"").body))]
        return 0, 0

    transport: Any = SimpleNamespace(connect=lambda address, deadline: after)
    connector = Connector(local, local, {"tcp": transport})
    monkeypatch.setattr(connector, "_handshake", handshake)
    peer: Any = SimpleNamespace(record=WorkerRecord("b", 1, 2, ("tcp://b:1",)))
    assert connector.connect(channel, peer) is None
    assert local.events == [("delivered", b"reply")]
