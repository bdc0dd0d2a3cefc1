"""Certificates for tests: a CA, and certificates that it signs."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)

DAY = datetime.timedelta(days=1)
Extensions = list[tuple[x509.ExtensionType, bool]]


class Authority:
    """A CA whose certificate is in `path`, and which writes certificates and keys next to it."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.path = directory / f"{name}.pem"
        certificate = self._signed(self._name, self._key.public_key(), 1, [(x509.BasicConstraints(True, None), True)])
        self.path.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(
        self, name: str, *, days: int = 1, password: bytes | None = None, extensions: Extensions | None = None
    ) -> tuple[Path, Path]:
        """Return the files of a new certificate and its key. Without `extensions`, its DNS name is `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a worker")])
        if extensions is None:
            extensions = [(x509.SubjectAlternativeName([x509.DNSName(name)]), False)]
        certificate, private = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate.write_bytes(self._signed(subject, key.public_key(), days, extensions).public_bytes(Encoding.PEM))
        encryption: KeySerializationEncryption = BestAvailableEncryption(password) if password else NoEncryption()
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        private.chmod(0o600)
        return certificate, private

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        days: int,
        extensions: Extensions,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + min(days, 0) * DAY - DAY)
            .not_valid_after(now + days * DAY)
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self._key, hashes.SHA256())
