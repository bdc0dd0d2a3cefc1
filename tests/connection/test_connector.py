"""Opening connections: a failed attempt does not block later callers, and nothing that arrives is left unread."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.channels import FakeAgent, FakeLink, connected_channel

from telegrad.connection.connector import Connector
from telegrad.connection.dialer import Dialer
from telegrad.connection.worker_record import WorkerRecord
from telegrad.protocol.limits import SessionSettings
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.packing import pack_small

_held: list[threading.Event] = []


def _wait_for_release() -> None:
    assert _held.pop().wait(20)


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
    local.reported.clear()

    def handshake(*_: object) -> tuple[int, int]:
        after.incoming = [Frame(Kind.MESSAGE, 1, 0, 0, bytes(pack_small(b"reply", b"").body))]
        return 0, 0

    transport: Any = SimpleNamespace(connect=lambda address, deadline: after, resumable=True)
    connector = Connector(local, local, {"tcp": transport})
    monkeypatch.setattr(connector, "_handshake", handshake)
    peer: Any = SimpleNamespace(record=WorkerRecord("b", 1, 2, ("tcp://b:1",)))
    assert connector.connect(channel, peer) is None
    assert local.reported == [("delivered", b"reply")]


def _poll(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


@pytest.mark.parametrize("transport", ["tcp", "plain tcp"])
def test_a_reply_that_arrives_together_with_the_welcome_is_read_at_once(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No thread waits for the reply, and the poller does not report what was read from the socket with the Welcome. With
    # these settings no ping helps within the time of the test.
    settings = AgentSettings(session=SessionSettings(heartbeat_interval=1000, silence_limit=3000))
    with local_group(["a", "b"], transport=transport, settings=settings) as group:
        a, b = group["a"], group["b"]
        a.call("b", operator.add, (1, 2))
        outgoing, incoming = a.peers.find("b").outgoing, b.peers.find("a").incoming
        assert outgoing is not None
        assert incoming is not None
        advance = Dialer._advance

        def is_sent() -> bool:
            with incoming.lock:
                return incoming.link is not None

        def advance_slowly(*args: Any) -> tuple[int, int] | None:
            _poll(lambda: incoming.session.unacked_bytes > 0)  # the reply
            received = advance(*args)
            if received is None:  # the Proof was sent
                _poll(is_sent)
            return received

        monkeypatch.setattr(Dialer, "_advance", advance_slowly)
        release, done = threading.Event(), threading.Event()
        _held.append(release)
        a.call_async("b", _wait_for_release, on_done=lambda call: done.set())
        _poll(lambda: not _held)
        assert outgoing.link is not None
        outgoing.link_ended(outgoing.link, "cut by the test")
        _poll(lambda: incoming.link is None)
        release.set()
        assert done.wait(20)
