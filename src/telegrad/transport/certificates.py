"""The certificates and TLS contexts of a worker: made on the spot for one incarnation, or brought by the user.

A certificate made on the spot proves nothing by itself, and nobody verifies it. Its SHA-256 is the *binding* of a
connection: both proofs of the handshake contain it, as each side sees it, so whoever knows no token cannot sit between
two workers with a certificate of its own. With the user's certificates, both sides also verify each other's chain.

TLS 1.3 is the only version, so there is no renegotiation. There are no session tickets: a resumed TLS session shows no
certificate. The key is ECDSA on P-256: a handshake takes as long as with Ed25519 (0.25 ms of the listener's time), and
systems restricted to FIPS algorithms allow it.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from telegrad.errors import CertificateError

if TYPE_CHECKING:
    from cryptography import x509

_NAME = "telegrad"  # in every certificate: a worker's name is not shown to strangers


@dataclass(frozen=True)
class Credentials:
    """What a worker needs to listen and to connect with TLS."""

    listener: ssl.SSLContext
    opener: ssl.SSLContext
    binding: bytes
    """The SHA-256 of this worker's certificate."""
    verifies: bool = False
    """Whether both sides verify each other's certificates."""


def make_credentials() -> Credentials:
    """Return credentials with a new self-signed certificate. Its key is never on disk."""
    pem, der = _self_signed()
    listener, opener = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_CLIENT)
    fd = os.memfd_create("telegrad-certificate", os.MFD_CLOEXEC)  # the ssl module loads keys from files only
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(pem)
        listener.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return Credentials(listener, opener, hashlib.sha256(der).digest())


def client_context() -> ssl.SSLContext:
    """Return a context to connect with. It verifies nothing: the caller compares the certificate's SHA-256."""
    return _context(ssl.PROTOCOL_TLS_CLIENT)


def load_credentials(certificate: Path, key: Path, ca: Path, worker: str | None = None) -> Credentials:
    """Return credentials with the user's certificate, its private key, and the CA that signed the group's certificates.

    Raises a CertificateError that names the file and the cause, also if the certificate is not for `worker`.
    """
    for path in (certificate, key, ca):
        _check_readable(path)
    if (mode := key.stat().st_mode & 0o777) & 0o077:
        raise CertificateError(
            f"the private key {key} has mode {mode:04o}, so other users can use it: run chmod 600 {key}"
        )
    der = _check_certificate(certificate, worker)
    listener, opener = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_CLIENT)
    for context in (listener, opener):
        try:
            context.load_cert_chain(certificate, key, password=_refuse_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                reason = f"the private key {key} does not belong to the certificate {certificate}"
            else:
                reason = f"{key} is not a private key in PEM format ({error.reason or error})"
            raise CertificateError(reason) from error
        except _EncryptedKey as error:
            raise CertificateError(
                f"the private key {key} is encrypted, and telegrad asks for no password: decrypt it with "
                f"`openssl pkey -in {key} -out FILE`, and keep it readable for you alone"
            ) from error
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise CertificateError(f"{ca} contains no CA certificate in PEM format") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return Credentials(listener, opener, hashlib.sha256(der).digest(), verifies=True)


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


def _self_signed() -> tuple[bytes, bytes]:
    """Return a new key and certificate as PEM, and the certificate as DER."""
    # Imported here, because the import takes 50 ms, and unix sockets need none of it.
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Nobody checks the dates, and clocks differ.
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
        .sign(key, SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)
    return pem, certificate.public_bytes(Encoding.DER)


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise CertificateError(f"cannot read {path}: {error.strerror}") from error


def _check_certificate(path: Path, worker: str | None) -> bytes:
    """Return the DER of the first certificate in a file, which is the worker's own, if it is valid today."""
    from cryptography import x509  # as in _self_signed
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise CertificateError(f"{path} is not a certificate in PEM format") from error
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        raise CertificateError(
            f"the certificate {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}: renew it"
        )
    if now < certificate.not_valid_before_utc:
        raise CertificateError(
            f"the certificate {path} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC: check "
            "the clock of this machine"
        )
    _check_usage(path, certificate)
    if worker is not None:
        _check_owner(path, certificate, worker)
    return certificate.public_bytes(Encoding.DER)


def _check_usage(path: Path, certificate: x509.Certificate) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        usage = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return
    needed = {ExtendedKeyUsageOID.SERVER_AUTH: "serverAuth", ExtendedKeyUsageOID.CLIENT_AUTH: "clientAuth"}
    missing = [name for oid, name in needed.items() if oid not in usage]
    if missing and ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in usage:
        raise CertificateError(
            f"the certificate {path} does not allow {' and '.join(missing)}, and workers both listen and connect: "
            "issue it with extendedKeyUsage=serverAuth,clientAuth, or without extendedKeyUsage"
        )


def _check_owner(path: Path, certificate: x509.Certificate, worker: str) -> None:
    from cryptography import x509

    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = extension.value.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        names = []
    if worker not in names:
        found = f"is for {', '.join(map(repr, names))}" if names else "has no DNS name"
        raise CertificateError(
            f"the certificate {path} {found}, but this worker is {worker!r}: issue it with subjectAltName=DNS:{worker}"
        )


class _EncryptedKey(Exception):
    """A private key needs a password."""


def _refuse_password() -> NoReturn:
    """Called by OpenSSL, which would otherwise ask on the terminal and wait."""
    raise _EncryptedKey
