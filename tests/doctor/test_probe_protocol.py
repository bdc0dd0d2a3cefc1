from __future__ import annotations

import pytest

from telegrad.doctor.probe_protocol import GREETING, PROOF, Greeting, decode_greeting, proof


def test_a_greeting_arrives_as_it_was() -> None:
    greeting = Greeting(bytes(range(16)), 12.5)
    assert decode_greeting(greeting.encode()) == greeting


def test_another_program_is_not_a_doctor() -> None:
    with pytest.raises(ValueError, match="another program answers there"):
        decode_greeting(b"S" * GREETING.size)


def test_a_proof_depends_on_token_role_and_both_nonces() -> None:
    proofs = {
        proof(token, role, client, server)
        for token in (b"t", b"u")
        for role in ("client", "server")
        for client in (b"1", b"2")
        for server in (b"3", b"4")
    }
    assert len(proofs) == 16
    assert {len(one) for one in proofs} == {PROOF}
