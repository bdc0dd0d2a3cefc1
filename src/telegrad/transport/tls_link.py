"""TLS 1.3 between the frames and the socket of a link.

OpenSSL works on memory (`ssl.MemoryBIO`), and this module moves the encrypted bytes. An SSL object is not safe for a
reader and a writer at once, and Python releases the GIL in it, so the link's lock covers it.

- Sending: see `tls_writer`.
- Receiving: a read of the socket may contain many records, and a record many frames. What OpenSSL already holds is not
  reported by the socket any more (`_undecrypted`).
- The opener performs the TLS handshake in `connect`; the listener in `receive`, without blocking.
- A preamble comes first. Until the listener has a valid one, it uses no OpenSSL and sends nothing. Until the peer is
  authenticated, OpenSSL gets at most MAX_UNAUTHENTICATED bytes of it.
"""

from __future__ import annotations

import errno
import hashlib
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, cast

from telegrad.errors import ProtocolError
from telegrad.transport.base import LinkClosed, Ready, RelayedConnection
from telegrad.transport.certificates import Credentials
from telegrad.transport.preamble_verifier import PreambleVerifier
from telegrad.transport.tls_errors import check_first_bytes, describe
from telegrad.transport.tls_writer import TlsWriter
from telegrad.wire.frames import Limits
from telegrad.wire.preamble import PREAMBLE_SIZE, check_beginning

MAX_UNAUTHENTICATED = 64 * 1024
"""How many bytes of an unauthenticated peer OpenSSL gets. Its hello, certificates and proof take 2 to 10 KB."""
_MAX_WITHOUT_DATA = 64 * 1024  # then a peer sends records without data in them, such as key updates
_MAX_ANSWERS = 64 * 1024  # bytes that OpenSSL wants to send by itself, while the peer reads nothing
_SCRATCH = 8 * 1024  # read at once
_LARGE_SCRATCH = 128 * 1024  # read at once while there is more
_SMALL_READS = 16  # so many reads that would fit into a small buffer end the use of a large one


class TlsLink(TlsWriter):
    """A connected socket with TLS. `preamble` is what the opener sends first, or what checks it at the listener."""

    def __init__(
        self, sock: socket.socket, *, peer: str, credentials: Credentials, preamble: bytes | PreambleVerifier
    ) -> None:
        super().__init__(sock, peer=peer)
        # Only the thread that reads uses these.
        self._opens = isinstance(preamble, bytes)
        self._credentials = credentials
        self._verifier = None if isinstance(preamble, bytes) else preamble
        self._preamble = preamble if isinstance(preamble, bytes) else b""  # as far as it has arrived, at the listener
        self._admitted = False
        self._scratch = memoryview(b"")
        self._last_read = 0  # bytes that the socket returned last
        self._small_reads = 0  # in a row into a large _scratch, plus 1; 0: _scratch is small
        self._unfed = 0  # bytes in _scratch that OpenSSL has not got yet
        self._fed = 0  # bytes that OpenSSL got in all; since the last data, if the peer is admitted
        self._error: Exception | None = None  # to be raised after the data before it
        self._recv_into = self._recv_decrypted if self._opens else self._recv_preamble
        if not self._opens:
            self.binding = credentials.binding

    def admit(self, limits: Limits, place: Callable[[int, int], memoryview | None]) -> None:
        super().admit(limits, place)
        self._admitted = self._established

    # -- the TLS handshake --------------------------------------------------------------------------------------

    def open(self, deadline: float) -> None:
        """Perform the TLS handshake as the side that connects. Raises LinkClosed or TimeoutError."""
        self.begin()
        while not self._established:
            ready = self.wait(deadline)
            if not ready & Ready.READ:
                if monotonic() >= deadline:
                    raise TimeoutError(f"{self.peer} did not answer the TLS hello in time")
                continue
            try:
                self._recv_decrypted(memoryview(b""))
                ended: ConnectionError | None = ConnectionResetError("end of file")
            except BlockingIOError:
                continue
            except ProtocolError as error:
                raise LinkClosed(f"the TLS handshake with {self.peer} failed: {error}") from error
            except (ConnectionResetError, BrokenPipeError) as error:
                ended = error
            if not self._established:
                raise _ended_early(self.peer) from ended

    def begin(self) -> None:
        """Send the preamble and the first message of TLS, as the side that connects."""
        with self._lock:
            self._prepare_tls()
            self._outgoing.write(self._preamble)
            self._advance_handshake()

    def _prepare_tls(self) -> None:
        scratch = memoryview(bytearray(_SCRATCH))
        self._start_tls(self._credentials.opener if self._opens else self._credentials.listener, opens=self._opens)
        self._scratch = scratch

    def _advance_handshake(self) -> None:
        """Continue the TLS handshake with what has arrived. Called with the lock held."""
        try:
            self._tls.do_handshake()
            self._handshake_done()
        except ssl.SSLWantReadError:
            pass  # there is more to come
        self._transmit()
        self._update_mask()

    def _handshake_done(self) -> None:
        if self._opens:
            self.binding = hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").digest()
        if self._credentials.verifies:
            certificate = cast("dict[str, Any]", self._tls.getpeercert() or {})
            self.peer_names = tuple(name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")
        self._establish()

    # -- receiving ----------------------------------------------------------------------------------------------

    def _recv_preamble(self, buffer: memoryview) -> int:
        """Read the opener's preamble, and if it is valid, what comes after it. As `_recv_decrypted` otherwise."""
        assert self._verifier is not None
        if not self.has_preamble:
            size = PREAMBLE_SIZE
            while len(self._preamble) < size:
                received = self._socket.recv(size - len(self._preamble))
                if not received:
                    return 0
                self._preamble += received
                size = check_beginning(self._preamble)
            relayed = self._verifier.use(self._preamble)
            if relayed is not None:
                raise RelayedConnection(relayed, self.release)
            self.has_preamble = True
        with self._lock:
            if self._closed:
                return 0
            self._prepare_tls()
            self._recv_into = self._recv_decrypted
        return self._recv_decrypted(buffer)

    def _recv_decrypted(self, buffer: memoryview) -> int:
        """Read into `buffer` as a non-blocking socket does: 0 at the end, and BlockingIOError if there is nothing."""
        total, more = 0, True
        if self._admitted and not self._undecrypted:
            # The usual case, written out: a read of the socket returns whole records, and they fit into the buffer.
            if self._last_read >= _SCRATCH or self._small_reads:
                self._resize()
            received = self._socket.recv_into(self._scratch)
            if not received:
                return 0
            self._unfed = self._last_read = received
            self._undecrypted = True
            with self._lock:
                try:
                    self._incoming.write(self._scratch[:received])
                    self._unfed = 0
                    self._fed += received
                    total = self._read(len(buffer), buffer)
                    if total:
                        self._fed = 0
                        # A read that does not fill the buffer has taken the whole record.
                        self._undecrypted = (
                            total == len(buffer) or self._incoming.pending > 0 or self._outgoing.pending > 0
                        )
                except (ssl.SSLError, MemoryError) as error:
                    # Nothing was decrypted, and the loop below tries again unless it can never succeed.
                    if not self._unfed and not isinstance(error, ssl.SSLWantReadError | MemoryError):
                        raise self._read_failed(error) from error
            if not self._undecrypted:
                return total
        while more:
            if not self._undecrypted:
                if self._admitted and (self._last_read >= _SCRATCH or self._small_reads):
                    self._resize()
                try:
                    received = self._socket.recv_into(self._scratch)
                except OSError:  # including that there is nothing to read
                    if total:
                        return total
                    raise
                if not received:
                    return total  # the next read returns 0 again
                self._unfed = self._last_read = received
                self._undecrypted = True
                more = received == len(self._scratch)
            else:
                more = not self._draining
            try:
                with self._lock:
                    count = self._take_records(buffer[total:] if total else buffer)
            except (LinkClosed, ProtocolError, MemoryError) as error:
                if not total:
                    raise
                if not isinstance(error, MemoryError):
                    self._error = error
                self._undecrypted = True  # the data before the error comes first
                return total
            if count < 0:
                return total
            total += count
            more = more and not self._undecrypted and total < len(buffer)
        if not total:
            raise BlockingIOError
        return total

    def _resize(self) -> None:
        self._scratch, self._small_reads = _resized(self._scratch, self._last_read, self._small_reads)

    def _take_records(self, buffer: memoryview) -> int:
        """Decrypt what has arrived into `buffer`, and return how much; -1: the peer has ended the stream."""
        if self._error is not None:
            raise self._error
        self._feed()
        try:
            if not self._established:
                self._advance_handshake()
            count, ended = self._decrypt(buffer)
            if self._outgoing.pending:  # an answer to a key update
                if self._outgoing.pending > _MAX_ANSWERS:
                    raise ProtocolError("it asks for new TLS keys too often")
                self._transmit()
                self._update_mask()
        except ssl.SSLError as error:
            raise self._read_failed(error) from error
        if count:
            if self._admitted:
                self._fed = 0
        elif self._fed > _MAX_WITHOUT_DATA:
            raise ProtocolError(f"{self._fed:,} bytes of TLS records without data")
        self._undecrypted = self._error is not None or self._incoming.pending > 0 or self._tls.pending() > 0
        return -1 if ended and not count else count

    def _read_failed(self, error: ssl.SSLError) -> Exception:
        """Return the error that the link raises from now on."""
        self._send_alert()
        self._error = describe(error)
        return self._error

    def _send_alert(self) -> None:
        """Tell the peer why OpenSSL ends the connection, if that is possible now."""
        if not self._started and not self._plain:
            with suppress(OSError, MemoryError):
                self._socket.send(self._outgoing.read())

    def _feed(self) -> None:
        """Give OpenSSL what the socket returned. After a MemoryError nothing is lost."""
        if not self._unfed:
            return
        data = self._scratch[: self._unfed]
        if not self._fed and not self._established:
            check_first_bytes(bytes(data[:6]), opens=self._opens)
        if not self._admitted and self._fed + len(data) > MAX_UNAUTHENTICATED:
            raise ProtocolError(f"more than {MAX_UNAUTHENTICATED:,} bytes before it was authenticated")
        try:
            self._incoming.write(data)
        except ssl.SSLError as error:
            raise MemoryError("no memory for received TLS records") from error
        self._fed += len(data)
        self._unfed = 0

    def _decrypt(self, buffer: memoryview) -> tuple[int, bool]:
        """Return how many bytes were decrypted into `buffer`, and whether the peer has ended the stream."""
        incoming, count, room = self._incoming, 0, len(buffer)
        try:
            while count < room:
                got = self._read(room - count, buffer[count:] if count else buffer)
                if not got:
                    return count, True
                count += got
                if count < room and not incoming.pending:
                    break
        except ssl.SSLWantReadError:
            return count, False
        except (ssl.SSLError, MemoryError) as error:
            if not count:
                raise
            self._error = describe(error) if isinstance(error, ssl.SSLError) else None
        return count, False

    def _begin_close(self) -> bool:
        begins = super()._begin_close()
        self._recv_into = _recv_closed  # breaks a reference cycle
        return begins


def _ended_early(peer: str) -> LinkClosed:
    return LinkClosed(
        f"{peer} ended the connection during the TLS handshake: a worker with another group token does that, one "
        "without TLS (tls=False, TELEGRAD_TLS=0), one that requires certificates (tls_ca), one of another telegrad "
        "version, and a program that is not telegrad"
    )


def _resized(scratch: memoryview, last_read: int, small_reads: int) -> tuple[memoryview, int]:
    """Return a large buffer after a read that filled the small one, and the small one after some small reads.

    The numbers are `TlsLink._small_reads`, before and then.
    """
    try:
        if not small_reads:
            return memoryview(bytearray(_LARGE_SCRATCH)), 1
        if last_read < _SCRATCH and small_reads >= _SMALL_READS:
            return memoryview(bytearray(_SCRATCH)), 0
    except MemoryError:
        return scratch, small_reads  # the one that there is works too
    return scratch, 1 if last_read >= _SCRATCH else small_reads + 1


def _recv_closed(buffer: memoryview) -> int:
    raise OSError(errno.EBADF, "closed by this worker")
