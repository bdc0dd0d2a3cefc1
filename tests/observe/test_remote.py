"""Looking at a group through the network, with its token."""

from __future__ import annotations

import operator
import secrets

import pytest
from tests.support.processes import wait_until

from telegrad.errors import AuthenticationError, TelegradError, TokenError
from telegrad.observe.attach import Attached
from telegrad.observe.attach_protocol import MOST_OBSERVERS, AttachRequest, encode
from telegrad.observe.model import ViewRequest
from telegrad.observe.remote import RemoteConnection
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.wire.frames import Kind

TOKEN = secrets.token_bytes(32)


def test_an_observer_with_the_token_sees_all_workers_over_tls_and_joins_nothing() -> None:
    with local_group(["a", "b"], transport="tcp", token=TOKEN) as group:
        group["a"].call("b", operator.add, (1, 2))
        (address,) = group["a"].me.addresses
        with Attached(RemoteConnection(address, TOKEN), same_host=False) as attached:
            for _ in range(2):  # several requests, one after the other
                view = attached.look(AttachRequest(ViewRequest(stacks=True, events_since=0)))
                assert [worker.name for worker in view.workers] == ["a", "b"]
                assert view.workers[0].connections["b"] == "tcp+tls"
                assert all(abs(offset) < 1.0 for offset in view.offsets.values())
        assert [member.identity.name for member in group["a"].peers.members.all()] == ["a", "b"]
        assert group["b"].call("a", operator.add, (1, 2)) == 3


def test_an_observer_with_another_token_is_refused() -> None:
    with local_group(["a"], transport="tcp", token=TOKEN) as group:
        (address,) = group["a"].me.addresses
        with pytest.raises((TelegradError, AuthenticationError)):
            RemoteConnection(address, secrets.token_bytes(32))


def test_an_observer_without_a_token_is_told_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TELEGRAD_TOKEN", "TELEGRAD_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TokenError, match="needs the token of its group: set TELEGRAD_TOKEN"):
        RemoteConnection("tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("foo", "invalid address 'tcp://foo'.*--address takes tcp://HOST:PORT"),
        ("unix:///tmp/a.sock", "not the address of a TCP port"),
        ("127.0.0.1:1", "nobody can be reached at tcp://127.0.0.1:1: .*only if their group has workers on several"),
    ],
)
def test_a_wrong_address_is_told_in_a_sentence(address: str, words: str) -> None:
    with pytest.raises(TelegradError, match=words):
        RemoteConnection(address, TOKEN)


def test_a_worker_in_registered_mode_lets_nobody_look_through_the_network() -> None:
    with local_group(["a"], transport="tcp", token=TOKEN, settings=AgentSettings(accept="registered")) as group:
        (address,) = group["a"].me.addresses
        with pytest.raises(TelegradError, match="does not let others look at it through the network"):
            RemoteConnection(address, TOKEN)


def test_a_registered_group_can_allow_it() -> None:
    settings = AgentSettings(accept="registered", observe="group")
    with local_group(["a", "b"], transport="tcp", token=TOKEN, settings=settings) as group:
        (address,) = group["a"].me.addresses
        with Attached(RemoteConnection(address, TOKEN), same_host=False) as attached:
            assert len(attached.look(AttachRequest()).workers) == 2


def test_one_observer_too_many_is_told_so() -> None:
    with local_group(["a"], transport="tcp", token=TOKEN) as group:
        (address,) = group["a"].me.addresses
        connections = [RemoteConnection(address, TOKEN) for _ in range(MOST_OBSERVERS)]
        try:
            for connection in connections:
                assert connection.ask(AttachRequest(who=True)).identity is not None
            connections.append(RemoteConnection(address, TOKEN))
            assert "has 8 observers, which is the most" in connections[-1].ask(AttachRequest(who=True)).error
        finally:
            for connection in connections:
                connection.close()


def test_answers_do_not_pile_up_for_an_observer_that_asks_and_does_not_read() -> None:
    with local_group(["a"], transport="tcp", token=TOKEN) as group:
        ring = group["a"].local.events
        for _ in range(8192):
            ring.record("member", 0.0, 0.0, what="x" * 1000)
        (address,) = group["a"].me.addresses
        connection = RemoteConnection(address, TOKEN)
        request = encode(AttachRequest(ViewRequest(events_since=0)))
        try:
            assert connection.ask(AttachRequest(who=True)).identity is not None
            (observer,) = group["a"].peers.observers.__self__._observers  # type: ignore[union-attr]
            for _ in range(3):  # the kernel has room for a part of the first answer
                answered = observer._last
                connection._link.send(Kind.MESSAGE, request, 0, 0, 0)
                wait_until(lambda: observer._last != answered or observer.link.owner is None)  # noqa: B023 - at once
            wait_until(lambda: observer.link.owner is None)  # it was disconnected, with the answer that it did not read
            assert not observer.link.unsent()
        finally:
            connection.close()
