"""What OpenSSL's errors mean, in words that a newcomer understands, and connections that speak no TLS."""

from __future__ import annotations

import ssl

from telegrad.errors import ProtocolError
from telegrad.transport.base import LinkClosed

_ALERT, _HANDSHAKE = 21, 22  # types of TLS records
_CLIENT_HELLO = 1
_MALFORMED = {
    "DECRYPTION_FAILED_OR_BAD_RECORD_MAC": "a TLS record was changed on the way",
    "UNSUPPORTED_PROTOCOL": "it offers no TLS 1.3",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate, and this worker was started with tls_ca",
}


def describe(error: ssl.SSLError) -> Exception:
    """Return the error that a link raises: LinkClosed if the stream ended, ProtocolError if the peer is at fault."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ProtocolError(f"its certificate was not accepted: {error.verify_message}")
    if "ALERT_" in reason:
        alert = reason.partition("ALERT_")[2].replace("_", " ").lower()
        return LinkClosed(f"the peer ended the TLS connection with the alert '{alert}'")
    if reason == "MALLOC_FAILURE":
        return LinkClosed("this worker has no memory for TLS")
    if not reason or isinstance(error, ssl.SSLEOFError | ssl.SSLSyscallError):
        return LinkClosed(f"the TLS connection ended: {error}")
    return ProtocolError(_MALFORMED.get(reason) or f"invalid TLS: {reason.replace('_', ' ').lower()}")


def check_first_bytes(first: bytes, *, opens: bool) -> None:
    """Raise a ProtocolError unless a TLS stream may start with `first`, of which up to 6 bytes are looked at."""
    if opens:
        if first[0] not in (_HANDSHAKE, _ALERT) or first[1:2] not in (b"", b"\3"):
            raise ProtocolError(f"the listener does not speak TLS: its answer starts with {first[:2]!r}")
        return
    if first[0] != _HANDSHAKE or first[1:2] not in (b"", b"\3") or first[5:6] not in (b"", bytes([_CLIENT_HELLO])):
        raise ProtocolError(f"not a TLS client hello: it starts with {first[:2]!r}")
