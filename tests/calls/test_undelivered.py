"""What becomes of messages for which this worker has no memory, and of those that it cannot send."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad.calls.undelivered import Undeliverable
from telegrad.errors import ResourceExhausted
from telegrad.testing.group import local_group
from telegrad.transport.socket_link import SocketLink
from telegrad.transport.tls_link import TlsLink
from telegrad.transport.unix import UnixTransport
from telegrad.wire.frames import BULK_CHUNK, BULK_HEAD
from telegrad.wire.messages import (
    Autocast,
    CleanupAutogradContextReq,
    Request,
    RequestWithState,
    decode_head,
    encode_head,
)
from telegrad.wire.reassembly import discarded

PATIENCE = 20.0


@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize(("transport", "cls"), [("tcp", TlsLink), ("plain tcp", SocketLink)])
def test_a_large_message_that_was_broken_off_is_sent_whole_over_the_next_connection(
    transport: str, cls: type[SocketLink], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, sent, failed = cls.send, [0], threading.Event()

    def send_or_fail(self: SocketLink, kind: int, *rest: Any) -> None:
        if kind in (BULK_HEAD, BULK_CHUNK) and not failed.is_set():
            sent[0] += 1
            if sent[0] > failing:
                failed.set()
                raise MemoryError("no memory for a frame")
        send(self, kind, *rest)

    with local_group(transport=transport) as group:
        x = torch.ones(500_000)  # four chunks, there and back
        assert group["a"].call("b", torch.neg, (x,), timeout=PATIENCE).sum() == -500_000
        monkeypatch.setattr(cls, "send", send_or_fail)
        for _ in range(3):
            assert group["a"].call("b", torch.neg, (x,), timeout=PATIENCE).sum() == -500_000
        assert failed.is_set()


def test_a_one_way_message_that_met_a_shortage_is_sent_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, refused, arrived = UnixTransport.connect, threading.Event(), threading.Event()

    def connect_or_fail(self: UnixTransport, address: str, deadline: float) -> Any:
        if not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return connect(self, address, deadline)

    monkeypatch.setattr(UnixTransport, "connect", connect_or_fail)
    with local_group() as group:
        group["b"].handle(CleanupAutogradContextReq, lambda *_: arrived.set())
        group["a"].tell(1, CleanupAutogradContextReq(5, 0))
        assert arrived.wait(PATIENCE)
        assert refused.is_set()


@pytest.mark.parametrize(
    "request_",
    [
        Request(7, "f" * 400, 0.0, False),
        RequestWithState(7, "f" * 400, 0.0, False, (), None, (), None, None, Autocast((("cpu", 1),), True)),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_request_whose_head_was_cut_is_refused_and_its_caller_stays(request_: Request) -> None:
    refused: list[int] = []

    def deliver(channel: object, message: Any) -> None:
        decode_head(message.head)

    local: Any = SimpleNamespace(name="b", executor=SimpleNamespace(pause=lambda: None))
    refusals = SimpleNamespace(cannot_take=lambda channel, call, error: refused.append(call))
    server: Any = SimpleNamespace(refusals=refusals)
    client: Any = None
    channel: Any = SimpleNamespace(outgoing=False, peer="a")
    error = ResourceExhausted("no memory")
    frame: Any = None
    message = discarded(encode_head(request_)[:256], 70_000, error, truncated=True)
    assert Undeliverable(local, client, server, deliver).report(channel, frame, message, error)
    assert refused == [7]
