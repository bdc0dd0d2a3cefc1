"""Which preambles a listener accepts: valid ones, once."""

from __future__ import annotations

import threading

import pytest

from telegrad.errors import AuthenticationError
from telegrad.transport import preamble_verifier
from telegrad.transport.preamble_verifier import PreambleVerifier
from telegrad.wire.preamble import NONCE_SIZE, pack_preamble
from telegrad.wire.relay_header import TICKET_SIZE, RelayHeader, Role, pack_relay_header

KEY, ADDRESS = b"k" * 32, "tcp://10.0.0.9:41234"


def preamble(number: int, key: bytes = KEY, address: str = ADDRESS) -> bytes:
    return pack_preamble(key, number.to_bytes(NONCE_SIZE, "big"), address)


def test_what_follows_a_preamble_or_a_relay_header_does_not_matter() -> None:
    verifier = PreambleVerifier(KEY, ADDRESS)
    header = RelayHeader(Role.CALLER, 1, 2, bytes(TICKET_SIZE))
    for beginning in (preamble(1), pack_relay_header(KEY, header, ADDRESS)):
        assert verifier.is_valid_beginning(beginning + b"a hello")
        assert not verifier.is_valid_beginning(beginning[:-1])
        verifier.use(beginning)
        assert not verifier.is_valid_beginning(beginning + b"a hello")
    assert not verifier.is_valid_beginning(pack_relay_header(b"x" * 32, header, ADDRESS))


def test_each_preamble_is_accepted_once() -> None:
    verifier = PreambleVerifier(KEY, ADDRESS)
    for number in range(3):
        assert verifier.is_valid_beginning(preamble(number))
        assert verifier.is_valid_beginning(preamble(number)), "looking at it does not use it"
        verifier.use(preamble(number))
        assert not verifier.is_valid_beginning(preamble(number))
        with pytest.raises(AuthenticationError, match="used before: somebody repeats what it recorded"):
            verifier.use(preamble(number))


@pytest.mark.parametrize(
    "wrong",
    [preamble(1, key=b"x" * 32), preamble(1, address="tcp://10.0.0.9:41235"), preamble(1)[:-1], b""],
    ids=["key", "address", "short", "empty"],
)
def test_invalid_ones_are_refused_with_the_likely_causes_and_not_remembered(wrong: bytes) -> None:
    verifier = PreambleVerifier(KEY, ADDRESS)
    assert not verifier.is_valid_beginning(wrong)
    with pytest.raises(AuthenticationError, match=f"the group tokens differ, or it dialled .* than {ADDRESS}"):
        verifier.use(wrong)
    assert not verifier._used


def test_the_memory_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preamble_verifier, "MAX_USED", 3)
    verifier = PreambleVerifier(KEY, ADDRESS)
    for number in range(5):
        verifier.use(preamble(number))
    assert len(verifier._used) == 3
    assert [verifier.is_valid_beginning(preamble(number)) for number in range(5)] == [True, True, False, False, False]


def test_of_threads_that_use_the_same_one_at_once_one_succeeds() -> None:
    verifier = PreambleVerifier(KEY, ADDRESS)
    together = threading.Barrier(4)
    accepted: list[int] = []

    def use() -> None:
        for number in range(50):
            together.wait(30)
            try:
                verifier.use(preamble(number))
            except AuthenticationError:
                continue
            accepted.append(number)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(accepted) == list(range(50))
