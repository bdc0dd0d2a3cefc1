"""A channel reports why its peer was lost, and many threads can use it at once."""

from __future__ import annotations

import operator
import threading

import pytest
import torch

from telegrad.errors import WorkerLost
from telegrad.testing.group import local_group
from telegrad.wire.frames import Kind
from telegrad.wire.slab_messages import pack_slab_reply


def test_a_loss_is_reported_with_its_cause_and_not_with_the_end_of_file_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = threading.Event()
    with local_group(["a", "b"]) as agents:
        a, b = agents["a"], agents["b"]
        b.call("a", operator.add, (1, 2))
        a.call("b", operator.add, (1, 2))
        a.on_lost(lambda record, reason: lost.set())
        outgoing, incoming = a.peers.find("b").outgoing, b.peers.find("a").incoming
        assert outgoing is not None
        assert outgoing.link is not None
        assert incoming is not None
        assert incoming.link is not None
        close = outgoing.link.close

        def close_and_wait() -> None:
            close()
            assert lost.wait(20)  # by then, the other side has closed its own connection

        monkeypatch.setattr(outgoing.link, "close", close_and_wait)
        incoming.link.send(Kind.SLAB_REPLY, pack_slab_reply(77, True), 0, 0, 0)
        with pytest.raises(WorkerLost, match="it broke the protocol: the peer answered an offer of slab 77"):
            a.call("b", operator.add, (1, 2))


def test_threads_that_send_large_tensors_to_one_worker_at_once_get_their_replies() -> None:
    errors: list[BaseException] = []

    def send(x: torch.Tensor, begin: threading.Barrier) -> None:
        try:
            begin.wait(20)
            for number in range(3):
                assert torch.equal(a.call("b", torch.add, (x, number)), x + number)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            errors.append(error)

    with local_group(["a", "b"]) as agents:
        a = agents["a"]
        for size in range(18, 22):  # each size needs another slab
            x, begin = torch.ones(1 << size), threading.Barrier(6)
            threads = [threading.Thread(target=send, args=(x, begin)) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    if errors:
        raise errors[0]
