"""TLS links: what they add to the contract of transports."""

from __future__ import annotations

import errno
import gc
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.certificate_authority import Authority
from tests.support.tls_links import (
    KEY,
    Connecting,
    RawClient,
    accept,
    connected,
    listening,
    preamble_for,
    read,
    read_to_the_end,
    soon,
)

from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.transport.addresses import parse_address
from telegrad.transport.base import LinkClosed, Listener, Ready
from telegrad.transport.certificates import load_credentials
from telegrad.transport.socket_link import ENDED
from telegrad.transport.tls_link import MAX_UNAUTHENTICATED, TlsLink
from telegrad.wire.frames import BULK_CHUNK, HEADER_SIZE, MESSAGE, Frame, Kind, Limits, pack_header
from telegrad.wire.preamble import PREAMBLE_SIZE, is_valid_preamble


def where(listener: Listener) -> tuple[str, int]:
    address = parse_address(listener.address)
    return address.host, address.port


class Relay:
    """Passes bytes between two connections. `change` may change what the opener sends."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.seen = b""
        self.corrupt = False
        self._ends: list[socket.socket] = []
        self._target = target
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        here, there = self._server.accept()[0], socket.create_connection(self._target)
        self._ends = [here, there]
        for source, sink in ((here, there), (there, here)):
            self._threads.append(threading.Thread(target=self._pass, args=(source, sink)))
            self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                if self.corrupt:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        for end in self._ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join()
        for end in [*self._ends, self._server]:
            end.close()


# -- the channel binding ----------------------------------------------------------------------------------------


def test_both_ends_have_the_same_binding() -> None:
    with connected() as (here, there):
        assert here.binding == there.binding
        assert len(here.binding) == 32
        assert here.peer_names is None
        assert there.peer_names is None


def test_a_man_in_the_middle_with_its_own_certificate_gives_the_ends_different_bindings() -> None:
    """It terminates TLS on both sides, and passes all frames on."""
    with connected() as (opener, middle_in), connected() as (middle_out, listener):
        opener.send(MESSAGE, b"for the listener", 1, 0, 0)
        (frame,) = read(middle_in, 1)
        middle_out.send(MESSAGE, frame.body, 1, 0, 0)
        assert bytes(read(listener, 1)[0].body) == b"for the listener"
        assert opener.binding != listener.binding


def test_a_relay_that_does_not_terminate_tls_sees_and_changes_nothing() -> None:
    with listening() as listener, closing(Relay(where(listener))) as relay:
        connecting = Connecting(listener.address, relay=relay.address)
        with closing(accept(listener)) as there:
            while connecting.is_alive():
                assert not list(there.receive())
                connecting.join(0.001)
            assert connecting.link is not None
            with closing(connecting.link) as here:
                assert here.binding == there.binding
                here.send(Kind.HANDSHAKE, b"the secret", 0, 0, 0)
                assert bytes(read(there, 1)[0].body) == b"the secret"
                assert b"the secret" not in relay.seen
                relay.corrupt = True
                here.send(Kind.HANDSHAKE, b"the secret", 0, 0, 0)
                error = read_to_the_end(there)
                assert isinstance(error, ProtocolError)
                assert str(error) == "a TLS record was changed on the way"
                with pytest.raises(ProtocolError, match="changed on the way"):  # again, as nothing comes after it
                    list(there.receive())


def test_both_ends_know_the_names_in_verified_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    mine, theirs = (load_credentials(*authority.issue(name), authority.path) for name in ("alice", "bob"))
    with connected(mine, theirs) as (here, there):
        assert here.peer_names == ("bob",)
        assert there.peer_names == ("alice",)
        assert here.binding == there.binding == theirs.binding


# -- connecting -------------------------------------------------------------------------------------------------


def test_connecting_ends_at_its_deadline_if_the_listener_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connecting = Connecting(f"tcp://127.0.0.1:{silent.getsockname()[1]}", patience=0.05)
        connecting.join()
        assert isinstance(connecting.error, TimeoutError)
        assert "did not answer the TLS hello in time" in str(connecting.error)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "a worker with another group token does that, one without TLS (tls=False, TELEGRAD_TLS=0)"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the listener does not speak TLS: its answer starts with b'HT'"),
        (b"\x15\3\1\0\2\2\x28", "the peer ended the TLS connection with the alert 'handshake failure'"),
        (b"\x16\3\3\0\4\2\0\0\0", "the TLS handshake with 127.0.0.1"),
        (b"\x16\3\3\x40\0" + b"x" * 200_000, "the TLS handshake with 127.0.0.1"),
    ],
    ids=["end", "http", "alert", "garbage", "flood"],
)
def test_a_listener_without_tls_is_described(answer: bytes, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connecting = Connecting(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        with server.accept()[0] as sock:
            sock.recv(65536)
            try:
                sock.sendall(answer)
            except ConnectionError:
                assert len(answer) > 100_000
        connecting.join()
        assert isinstance(connecting.error, LinkClosed)
        assert reason in str(connecting.error)


@pytest.mark.parametrize("wrong", ["opener", "listener"])
def test_a_certificate_that_is_not_accepted_ends_both_sides_with_the_reason(tmp_path: Path, wrong: str) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    good = load_credentials(*authority.issue("good"), authority.path)
    bad = load_credentials(*other.issue("bad"), other.path)
    with listening(bad if wrong == "listener" else good) as listener:
        connecting = Connecting(listener.address, bad if wrong == "opener" else good)
        with closing(accept(listener)) as there:
            assert "unknown ca" in str(read_to_the_end(there))
            connecting.join()
        assert isinstance(connecting.error, LinkClosed)
        assert "its certificate was not accepted: self-signed certificate in certificate chain" in str(connecting.error)


def test_a_client_without_a_certificate_is_refused_with_the_reason(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with listening(load_credentials(*authority.issue("a"), authority.path)) as listener:
        connecting = Connecting(listener.address)
        with closing(accept(listener)) as there:
            error = read_to_the_end(there)
        connecting.join()
        assert str(error) == "it has no certificate, and this worker was started with tls_ca"
        assert connecting.link is not None  # it learns of it when it reads: TLS 1.3 saves that round trip
        error = read_to_the_end(connecting.link)
        assert str(error) == "the peer ended the TLS connection with the alert 'certificate required'"
        connecting.link.close()


def test_an_interrupted_connect_closes_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: TlsLink, deadline: float | None, poller: object = None) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(TlsLink, "wait", interrupt)
    with listening() as listener:
        connecting = Connecting(listener.address)
        connecting.join()
        assert isinstance(connecting.error, KeyboardInterrupt)
        monkeypatch.undo()
        with closing(accept(listener)) as there:
            assert isinstance(read_to_the_end(there), LinkClosed)


# -- the preamble -----------------------------------------------------------------------------------------------


def test_the_preamble_and_the_client_hello_are_sent_together() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        connecting = Connecting(address)
        with server.accept()[0] as sock:
            first = sock.recv(65536)
        connecting.join()
    assert is_valid_preamble(first[:PREAMBLE_SIZE], KEY, address)
    assert first[PREAMBLE_SIZE : PREAMBLE_SIZE + 2] == b"\x16\3"


def test_the_opener_of_another_group_gets_no_answer_and_learns_the_likely_cause() -> None:
    with listening() as listener:
        connecting = Connecting(listener.address, key=b"the key of quite another group")
        with closing(accept(listener)) as there:
            error = read_to_the_end(there)
        connecting.join()
    assert isinstance(error, AuthenticationError)
    assert isinstance(connecting.error, LinkClosed)
    assert "a worker with another group token does that" in str(connecting.error)


def test_the_preamble_may_arrive_byte_by_byte() -> None:
    with listening() as listener, socket.create_connection(where(listener)) as sock, closing(accept(listener)) as there:
        for number, byte in enumerate(preamble_for(listener)):
            assert not there.has_preamble
            assert not hasattr(there, "_tls"), f"OpenSSL is used after {number} bytes"
            sock.sendall(bytes([byte]))
            assert there.wait(soon()) & Ready.READ
            assert not list(there.receive())
        assert there.has_preamble
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        sock.setblocking(True)
        client = RawClient(sock, b"")
        send_a_frame(client, there)
        client.close()


@pytest.mark.parametrize("size", [0, 1, PREAMBLE_SIZE - 1])
def test_a_peer_may_leave_before_its_preamble_is_complete(size: int) -> None:
    with listening() as listener:
        with socket.create_connection(where(listener)) as sock:
            there = accept(listener)
            sock.sendall(preamble_for(listener)[:size])
        with closing(there):
            assert str(read_to_the_end(there)) == ENDED
            assert not hasattr(there, "_tls")


def test_a_preamble_is_not_lost_if_there_is_no_memory_for_openssl(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = TlsLink._start_tls, [MemoryError(), MemoryError()]

    def fail(link: TlsLink, context: ssl.SSLContext, *, opens: bool) -> None:
        if not opens and failures:
            raise failures.pop()
        start(link, context, opens=opens)

    monkeypatch.setattr(TlsLink, "_start_tls", fail)
    with listening() as listener:
        connecting = Connecting(listener.address)
        with closing(accept(listener)) as there:
            assert there.wait(soon()) & Ready.READ
            for _ in range(2):
                with pytest.raises(MemoryError):
                    list(there.receive())
            while connecting.is_alive():
                assert not list(there.receive())
                connecting.join(0.001)
            assert connecting.link is not None, connecting.error
            connecting.link.close()


def test_openssl_without_memory_is_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:
        def wrap_bio(self, *args: object, **kwargs: object) -> None:
            raise ssl.SSLError(1, "malloc failure")

    with listening() as listener, socket.create_connection(where(listener)) as sock, closing(accept(listener)) as there:
        sock.sendall(preamble_for(listener))
        assert there.wait(soon()) & Ready.READ
        monkeypatch.setattr(there, "_credentials", replace(there._credentials, listener=Exhausted()))
        with pytest.raises(MemoryError, match="no memory for a TLS connection"):
            list(there.receive())


def test_a_link_that_is_closed_while_its_preamble_is_read_does_not_start_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as listener, socket.create_connection(where(listener)) as sock:
        there = accept(listener)
        sock.sendall(preamble_for(listener))
        assert there.wait(soon()) & Ready.READ
        assert there._verifier is not None
        use = there._verifier.use

        def use_and_close(preamble: bytes) -> None:
            use(preamble)
            there.close()

        monkeypatch.setattr(there._verifier, "use", use_and_close)
        with pytest.raises(LinkClosed, match="closed by this worker"):
            list(there.receive())
        assert not hasattr(there, "_tls")


# -- receiving --------------------------------------------------------------------------------------------------


def test_what_openssl_holds_counts_as_something_to_read() -> None:
    with connected() as (here, there):
        here.send(BULK_CHUNK, b"a" * 200_000, 1, 0, 0)
        here.send(BULK_CHUNK, b"b" * 200_000, 2, 0, 0)
        here.send(MESSAGE, b"c", 1, 0, 0)
        bodies: list[bytes] = []
        deadline = soon()
        while len(bodies) < 3:
            assert there.wait(deadline) & Ready.READ
            for frame in there.receive():
                bodies.append(bytes(frame.body))
                break  # the rest of the read stays in the reader, and in OpenSSL
        assert bodies == [b"a" * 200_000, b"b" * 200_000, b"c"]


def test_a_frame_that_fills_the_buffer_does_not_hide_the_next_one() -> None:
    with connected() as (here, there):
        size = 128 * 1024 - HEADER_SIZE
        for number in range(1, 4):
            here.send(MESSAGE, bytes([number]) * size, number, 0, 0)
        assert [frame.sequence for frame in read(there, 3)] == [1, 2, 3]
        assert there.wait(time.monotonic()) == Ready.NOTHING


def test_the_read_buffer_is_large_only_while_there_is_much_to_read() -> None:
    with connected() as (here, there):
        idle = len(there._scratch)
        assert idle <= 16 * 1024
        for number in range(1, 9):
            here.send(BULK_CHUNK, b"c" * 500_000, number, 0, 0)
        read(there, 8, here)
        assert len(there._scratch) > idle
        for number in range(1, 40):
            here.send(MESSAGE, b"small", number, 0, 0)
            assert [bytes(frame.body) for frame in read(there, 1)] == [b"small"]
        assert len(there._scratch) == idle


def test_a_truncated_stream_is_never_taken_for_a_frame() -> None:
    with listening() as listener, closing(Relay(where(listener))) as relay:
        connecting = Connecting(listener.address, relay=relay.address)
        with closing(accept(listener)) as there:
            while connecting.is_alive():
                assert not list(there.receive())
                connecting.join(0.001)
            assert connecting.link is not None
            with closing(connecting.link) as here:
                here._tls.write(pack_header(Kind.HANDSHAKE, 100, 0, 0, 0) + b"half of it")
                here.flush()
                here._tls.write(b"x" * 90)
                here._socket.send(here._outgoing.read()[:-1])  # and a record without its last byte
            assert isinstance(read_to_the_end(there), LinkClosed)


def send_a_frame(client: RawClient, there: TlsLink) -> None:
    """Perform the TLS handshake, and send one frame, which arrives."""
    serving = threading.Thread(target=client.connect)
    serving.start()
    while serving.is_alive():
        assert not list(there.receive())
        serving.join(0.001)
    assert client.write(pack_header(Kind.HANDSHAKE, 1, 0, 0, 0) + b"x")
    assert bytes(read(there, 1)[0].body) == b"x"


def test_a_peer_may_end_tls_before_the_connection() -> None:
    with listening() as listener, socket.create_connection(where(listener)) as sock, closing(accept(listener)) as there:
        client = RawClient(sock, preamble_for(listener))
        send_a_frame(client, there)
        client._library.SSL_shutdown(client._ssl)
        assert str(read_to_the_end(there)) == ENDED
        client.close()


@pytest.mark.parametrize("reads", [True, False], ids=["reads the answers", "does not"])
def test_a_peer_cannot_ask_for_new_keys_without_end(reads: bool) -> None:
    with listening() as listener, socket.create_connection(where(listener)) as sock, closing(accept(listener)) as there:
        client = RawClient(sock, preamble_for(listener))
        serving = threading.Thread(target=client.connect)
        serving.start()
        while serving.is_alive():
            assert not list(there.receive())
            serving.join(0.001)
        for number in range(3):  # a few are fine
            assert client.update_keys()
            assert client.write(pack_header(Kind.HANDSHAKE, 1, 0, 0, 0) + b"%d" % number)
            assert bytes(read(there, 1)[0].body) == b"%d" % number
        there.send(Kind.HANDSHAKE, b"y", 0, 0, 0)
        assert client.read(100)[HEADER_SIZE:] == b"y"
        there.admit(Limits(), lambda sequence, length: None)

        def ask() -> None:
            while client.update_keys():
                if reads:
                    sock.setblocking(False)
                    client.read(1)
                    sock.setblocking(True)

        asking = threading.Thread(target=ask)
        asking.start()
        error = read_to_the_end(there)
        there.close()
        asking.join()
        client.close()
        assert isinstance(error, ProtocolError)
        # Which limit is reached first depends on how much arrives at once.
        assert "asks for new TLS keys too often" in str(error) or "of TLS records without data" in str(error)


def test_openssl_gets_a_bounded_number_of_bytes_before_the_peer_is_admitted() -> None:
    with connected(admitted=False) as (here, there):
        for _ in range(MAX_UNAUTHENTICATED // 2000 + 2):
            here.send(Kind.HANDSHAKE, b"x" * 2000, 0, 0, 0)
        frames = 0

        def read_all() -> None:
            nonlocal frames
            while there.wait(soon()):
                for _ in there.receive():
                    frames += 1

        with pytest.raises(ProtocolError, match="more than 65,536 bytes before it was authenticated"):
            read_all()
        assert 20 < frames < 33


def test_no_byte_is_lost_if_there_is_no_memory_for_received_records(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        """An incoming BIO that fails at first."""

        def __init__(self, link: TlsLink) -> None:
            self._bio, self._left = link._incoming, 3

        @property
        def pending(self) -> int:
            return self._bio.pending

        def write(self, data: memoryview) -> int:
            self._left -= 1
            if self._left >= 0:
                raise MemoryError
            return self._bio.write(data)

    with connected() as (here, there):
        body = os.urandom(100_000)
        here.send(MESSAGE, body, 1, 0, 0)
        monkeypatch.setattr(there, "_incoming", Short(there))
        failures, frames = 0, list[Frame]()
        deadline = soon()
        while not frames:
            assert there.wait(deadline) & Ready.READ
            try:
                frames.extend(there.receive())
            except MemoryError:
                failures += 1
        assert failures > 0
        assert bytes(frames[0].body) == body


def test_the_system_may_be_out_of_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (here, there):
        here.send(MESSAGE, b"x", 1, 0, 0)
        assert there.wait(soon()) & Ready.READ
        real = there._socket

        class Exhausted:
            def recv_into(self, buffer: memoryview) -> int:
                raise OSError(errno.ENOBUFS, "No buffer space available")

        monkeypatch.setattr(there, "_socket", Exhausted())
        with pytest.raises(OSError, match="No buffer space"):
            list(there.receive())
        monkeypatch.setattr(there, "_socket", real)
        assert bytes(read(there, 1)[0].body) == b"x"


@pytest.mark.parametrize("end", [TlsLink.close, TlsLink.abort])
def test_a_closed_link_is_freed_at_once(end: Callable[[TlsLink], None]) -> None:
    gc.collect()
    gc.disable()
    try:
        with listening() as listener, socket.create_connection(where(listener)):
            link = accept(listener)
            freed = weakref.ref(link)
            end(link)
            del link
            assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("end", [TlsLink.close, TlsLink.abort])
def test_a_closed_link_keeps_nothing_of_what_it_did_not_send(end: Callable[[TlsLink], None]) -> None:
    with connected() as (here, _):
        body = bytearray(32 * 1024 * 1024)
        here.send(BULK_CHUNK, body, 1, 0, 0)
        here.send(BULK_CHUNK, body, 2, 0, 0)
        assert here.unsent()
        end(here)
        assert not here.unsent()
        body.append(0)  # raises BufferError while somebody has a view of it
        with pytest.raises(LinkClosed, match="closed by this worker"):
            list(here.receive())
