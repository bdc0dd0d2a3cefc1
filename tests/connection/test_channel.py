"""Who reads a link: the thread that waits; between calls nobody, for a moment; and then the poller, if it must."""

from __future__ import annotations

import operator
import threading
import time
from typing import Any

import pytest
import torch

from telegrad.errors import WorkerLost
from telegrad.testing.group import local_group
from telegrad.wire.frames import Kind
from telegrad.wire.slab_messages import pack_slab_reply

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


def test_the_cause_of_a_loss_is_told_and_not_the_end_of_file_that_follows_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = threading.Event()
    with local_group(["a", "b"]) as agents:
        a, b = agents["a"], agents["b"]
        b.call("a", operator.add, (1, 2))
        a.call("b", operator.add, (1, 2))
        a.on_lost(lambda record, reason: lost.set())
        outgoing, answering = a.peers.find("b").outgoing, b.peers.find("a").incoming
        assert outgoing is not None
        assert outgoing.link is not None
        assert answering is not None
        assert answering.link is not None
        close = outgoing.link.close

        def close_and_see() -> None:
            close()
            assert lost.wait(20)  # until then, the other side has closed its connection with a

        monkeypatch.setattr(outgoing.link, "close", close_and_see)
        answering.link.send(Kind.SLAB_REPLY, pack_slab_reply(77, True), 0, 0, 0)
        with pytest.raises(WorkerLost, match="it broke the protocol: an answer came about slab 77"):
            a.call("b", operator.add, (1, 2))


def test_threads_that_send_large_tensors_at_once_to_one_worker_get_their_answers() -> None:
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
        for size in range(18, 22):  # each needs a slab of another size
            x, begin = torch.ones(1 << size), threading.Barrier(6)
            threads = [threading.Thread(target=send, args=(x, begin)) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    if errors:
        raise errors[0]
