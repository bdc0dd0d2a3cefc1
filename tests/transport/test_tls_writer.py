"""The sending half of TLS links: order, shortages and interrupts."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from contextlib import closing

import pytest
from tests.support.tls_links import Connecting, accept, connected, listening, read, read_to_the_end, soon

from telegrad.transport.base import LinkClosed, Ready
from telegrad.transport.tls_link import TlsLink
from telegrad.wire.frames import BULK_CHUNK, CHUNK, MESSAGE, Kind


def test_frames_sent_before_the_tls_handshake_arrive_after_it() -> None:
    with listening() as listener:
        connecting = Connecting(listener.address)
        with closing(accept(listener)) as there:
            there.send(Kind.HANDSHAKE, b"early", 0, 0, 0)
            assert not there.unsent()  # the poller would report room for it without end
            while connecting.is_alive():
                assert not list(there.receive())
                connecting.join(0.001)
            assert connecting.link is not None
            with closing(connecting.link) as here:
                here.send(Kind.HANDSHAKE, b"", 0, 0, 0)
                read(there, 1)
                assert bytes(read(here, 1)[0].body) == b"early"


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("what", ["memory for a piece", "memory of the kernel", "buffers of the kernel"])
def test_a_frame_arrives_later_if_memory_is_short(monkeypatch: pytest.MonkeyPatch, what: str, size: int) -> None:
    class Short:
        """A socket or BIO that fails three times."""

        def __init__(self, real: object, error: Exception) -> None:
            self._real, self._error, self._left = real, error, 3

        def __getattr__(self, name: str) -> object:
            if name in ("read", "send"):
                self._left -= 1
                if self._left >= 0:
                    raise self._error
            return getattr(self._real, name)

    with connected() as (here, there):
        body = os.urandom(size)
        if what == "memory for a piece":
            monkeypatch.setattr(here, "_outgoing", Short(here._outgoing, MemoryError()))
        else:
            error = MemoryError() if what == "memory of the kernel" else OSError(errno.ENOBUFS, "no buffers")
            monkeypatch.setattr(here, "_socket", Short(here._socket, error))
        here.send(MESSAGE, body, 1, 0, 0)
        here.send(MESSAGE, b"after it", 2, 0, 0)
        assert here.unsent()
        deadline = soon()
        while here.unsent():
            assert time.monotonic() < deadline
            assert here.wait(deadline) & Ready.WRITE
        assert [bytes(frame.body) for frame in read(there, 2)] == [body, b"after it"]
        monkeypatch.undo()


@pytest.mark.parametrize("size", [10, 100_000])
def test_an_interrupt_between_encrypting_and_sending_ends_the_link(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    class Interrupted:
        def __init__(self, real: socket.socket) -> None:
            self._real = real

        def send(self, data: memoryview) -> int:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

    with connected() as (here, there):
        monkeypatch.setattr(here, "_socket", Interrupted(here._socket))
        with pytest.raises(KeyboardInterrupt):
            here.send(MESSAGE, b"x" * size, 1, 0, 0)
        monkeypatch.undo()
        here.send(MESSAGE, b"x", 2, 0, 0)
        assert isinstance(read_to_the_end(there), LinkClosed)
        assert "KeyboardInterrupt on this worker, in the middle of sending" in str(read_to_the_end(here))


def test_control_overtakes_bulk_that_is_not_encrypted_yet() -> None:
    with connected() as (here, there):
        for number in range(1, 41):
            here.send(BULK_CHUNK, bytes([number]) * CHUNK, number, 0, 0)
        here.send(MESSAGE, b"quick", 1, 0, 0)
        frames = read(there, 41, here)
        assert [frame.sequence for frame in frames if frame.kind == BULK_CHUNK] == list(range(1, 41))
        assert [frame.kind for frame in frames].index(MESSAGE) < 30
        assert all(bytes(frame.body) == bytes([frame.sequence]) * CHUNK for frame in frames if frame.kind == BULK_CHUNK)


def test_two_threads_may_send_and_receive_bulk_at_once() -> None:
    with connected() as (here, there):
        count = 30

        def run(link: TlsLink, fill: int, found: list[bool]) -> None:
            for number in range(1, count + 1):
                link.send(BULK_CHUNK, bytes([fill]) * CHUNK, number, 0, 0)
            arrived = 0
            deadline = soon()
            while arrived < count or link.unsent():
                assert time.monotonic() < deadline
                link.wait(deadline)
                for frame in link.receive():
                    arrived += 1
                    found.append(bytes(frame.body) == bytes([3 - fill]) * CHUNK)

        found: list[bool] = []
        threads = [threading.Thread(target=run, args=(link, fill, found)) for link, fill in ((here, 1), (there, 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 2 * count
