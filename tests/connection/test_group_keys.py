"""The keys of a group are derived from its token as HKDF does, and never shown."""

from __future__ import annotations

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from telegrad.connection.group_keys import authenticate, derive_keys
from telegrad.wire.frames import VERSION


@given(token=st.binary(min_size=16, max_size=100))
def test_keys_are_those_of_hkdf_sha256(token: bytes) -> None:
    def expected(purpose: str) -> bytes:
        return HKDF(SHA256(), 32, None, f"telegrad {VERSION} {purpose}".encode()).derive(token)

    keys = derive_keys(token)
    assert keys.handshake == expected("handshake")
    assert keys.store == expected("rendezvous store")
    assert keys.preamble == expected("preamble")


def test_keys_differ_from_each_other_and_from_those_of_other_tokens() -> None:
    keys, others = derive_keys(b"one token"), derive_keys(b"another token")
    assert len({key for one in (keys, others) for key in (one.handshake, one.store, one.preamble)}) == 6


def test_no_key_is_shown() -> None:
    keys = derive_keys(b"one token")
    for text in (repr(keys), str(keys), f"{keys}"):
        assert text == "GroupKeys()"


def test_no_two_sequences_have_the_same_mac() -> None:
    key = bytes(32)
    macs = [authenticate(key, *values) for values in (("ab",), ("a", "b"), (b"ab",), (("a", "b"),), ("a", "b", ""))]
    assert len(set(macs)) == len(macs)
