"""Certificates: made on the spot, or the user's own."""

from __future__ import annotations

import hashlib
import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.support.certificate_authority import Authority

from telegrad.errors import CertificateError
from telegrad.transport import certificates
from telegrad.transport.certificates import Credentials, load_credentials, make_credentials


def shake_hands(opener: ssl.SSLContext, listener: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Connect two contexts in memory, and return the two ends."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = opener.wrap_bio(back, there), listener.wrap_bio(there, back, server_side=True)
    for _ in range(2):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends


def test_the_binding_is_the_sha256_of_the_certificate_that_the_opener_sees() -> None:
    mine, theirs = make_credentials(), make_credentials()
    opener, listener = shake_hands(mine.opener, theirs.listener)
    seen = opener.getpeercert(binary_form=True)
    assert seen is not None
    assert hashlib.sha256(seen).digest() == theirs.binding
    assert listener.version() == opener.version() == "TLSv1.3"
    assert len({mine.binding, theirs.binding}) == 2


def test_the_certificate_names_no_worker_and_no_host() -> None:
    mine = make_credentials()
    opener, _ = shake_hands(mine.opener, mine.listener)
    certificate = x509.load_der_x509_certificate(opener.getpeercert(binary_form=True) or b"")
    assert certificate.subject.rfc4514_string() == certificate.issuer.rfc4514_string() == "CN=telegrad"
    assert not list(certificate.extensions)


def test_the_listener_sends_no_session_ticket() -> None:
    mine = make_credentials()
    opener, listener = shake_hands(mine.opener, mine.listener)
    listener.write(b"x")
    assert opener.read(1) == b"x"
    assert opener.session is None or not opener.session.has_ticket


@pytest.mark.parametrize("side", ["opener", "listener"])
def test_older_versions_are_refused(side: str) -> None:
    mine = make_credentials()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if side == "opener" else ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        shake_hands(*((mine.opener, old) if side == "opener" else (old, mine.listener)))


def test_the_key_leaves_no_file_and_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", lambda self, path, *rest: opened.append(os.readlink(path)))
    before = os.listdir("/proc/self/fd")
    make_credentials()
    assert os.listdir("/proc/self/fd") == before
    assert opened == ["/memfd:telegrad-certificate (deleted)"]


def test_the_descriptor_is_closed_if_loading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ssl.SSLContext, path: str) -> None:
        raise MemoryError

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(MemoryError):
        make_credentials()
    assert os.listdir("/proc/self/fd") == before


def test_unix_sockets_need_no_cryptography() -> None:
    program = "import sys, telegrad.bootstrap, telegrad.transport.certificates; print('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == (
        "False\n"
    )


# -- the user's own ---------------------------------------------------------------------------------------------


def loaded(authority: Authority, name: str) -> Credentials:
    return load_credentials(*authority.issue(name), authority.path)


def test_both_sides_verify_certificates_of_the_same_ca(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    a, b = loaded(authority, "a"), loaded(authority, "b")
    assert a.verifies
    opener, listener = shake_hands(a.opener, b.listener)
    assert hashlib.sha256(opener.getpeercert(binary_form=True) or b"").digest() == b.binding
    for end, name in ((opener, "b"), (listener, "a")):
        assert (end.getpeercert() or {})["subjectAltName"] == (("DNS", name),)


def test_certificates_of_another_ca_or_none_are_refused(tmp_path: Path) -> None:
    mine = loaded(Authority(tmp_path), "a")
    for other in (loaded(Authority(tmp_path, "other"), "b"), make_credentials()):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(mine.opener, other.listener)
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        shake_hands(make_credentials().opener, mine.listener)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_file_is_named(tmp_path: Path, missing: int) -> None:
    authority = Authority(tmp_path)
    files = [*authority.issue("a"), authority.path]
    files[missing].unlink()
    with pytest.raises(CertificateError, match=f"cannot read {files[missing]}: No such file or directory"):
        load_credentials(*files)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("a")
    key.chmod(0o644)
    with pytest.raises(CertificateError, match=f"{key} has mode 0644, so other users can use it: run chmod 600 {key}"):
        load_credentials(certificate, key, authority.path)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (certificate, _), (_, key) = authority.issue("a"), authority.issue("b")
    with pytest.raises(CertificateError, match=f"{key} does not belong to the certificate {certificate}"):
        load_credentials(certificate, key, authority.path)


@pytest.mark.parametrize(("days", "reason"), [(-1, "expired on"), (3, "is not valid before")])
def test_an_expired_or_future_certificate_is_refused(
    tmp_path: Path, days: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("a", days=days)
    if days > 0:

        class Earlier(certificates.datetime.datetime):  # type: ignore[name-defined,misc]  # the module's own import
            @classmethod
            def now(cls, tz: object = None) -> certificates.datetime.datetime:  # type: ignore[name-defined]  # as above
                return certificates.datetime.datetime(2001, 1, 1, tzinfo=certificates.datetime.UTC)

        monkeypatch.setattr(certificates.datetime, "datetime", Earlier)
    with pytest.raises(CertificateError, match=reason):
        load_credentials(certificate, key, authority.path)


def test_an_encrypted_key_is_refused_without_asking_for_its_password(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("a", password=b"secret")
    with pytest.raises(
        CertificateError, match="is encrypted, and telegrad asks for no password: decrypt it with `openssl pkey"
    ):
        load_credentials(certificate, key, authority.path)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (0, "is not a certificate in PEM format"),
        (1, "is not a private key in PEM format"),
        (2, "contains no CA certificate in PEM format"),
    ],
)
def test_a_file_of_the_wrong_kind_is_named(tmp_path: Path, broken: int, reason: str) -> None:
    authority = Authority(tmp_path)
    files = [*authority.issue("a"), authority.path]
    files[broken].write_bytes(b"hello")
    with pytest.raises(CertificateError, match=f"{files[broken]} {reason}"):
        load_credentials(*files)


def test_a_certificate_for_another_worker_is_refused_at_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("bob")
    with pytest.raises(
        CertificateError, match="is for 'bob', but this worker is 'a': issue it with subjectAltName=DNS:a"
    ):
        load_credentials(*files, authority.path, worker="a")
    assert load_credentials(*files, authority.path, worker="bob").verifies


def test_a_certificate_without_a_dns_name_is_refused_at_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with pytest.raises(CertificateError, match="has no DNS name, but this worker is 'a'"):
        load_credentials(*authority.issue("a", extensions=[]), authority.path, worker="a")


@pytest.mark.parametrize(
    ("usage", "missing"),
    [("SERVER_AUTH", "clientAuth"), ("CLIENT_AUTH", "serverAuth"), ("CODE_SIGNING", "serverAuth and clientAuth")],
)
def test_a_certificate_for_one_side_alone_is_refused_at_start(tmp_path: Path, usage: str, missing: str) -> None:
    authority = Authority(tmp_path)
    limited = x509.ExtendedKeyUsage([getattr(ExtendedKeyUsageOID, usage)])
    with pytest.raises(CertificateError, match=f"does not allow {missing}, and workers both listen and connect"):
        load_credentials(*authority.issue("a", extensions=[(limited, False)]), authority.path)


def test_a_certificate_for_both_sides_is_accepted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    files = authority.issue("a", extensions=[(x509.ExtendedKeyUsage(both), False)])
    assert load_credentials(*files, authority.path).verifies
