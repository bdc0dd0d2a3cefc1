"""The frame header, the lanes, and the bodies of PING and GOODBYE."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import LimitExceeded, OtherVersion, ProtocolError
from telegrad.wire.frames import (
    BULK,
    HEADER_SIZE,
    MAX_CAUSE,
    MESSAGE,
    VERSION,
    Kind,
    Limits,
    check_header,
    lane_of,
    pack_header,
    pack_ping,
    unpack_goodbye,
    unpack_ping,
)


@given(header=st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE))
def test_a_random_header_raises_a_protocol_error(header: bytes) -> None:
    if header[:2] == b"tg":
        return
    with pytest.raises(ProtocolError, match="not a telegrad frame"):
        check_header(header, 0, Limits())


def test_another_protocol_version_is_named_in_the_error() -> None:
    header = bytearray(pack_header(MESSAGE, 0, 1, 0, 0))
    header[2] = VERSION + 1
    with pytest.raises(OtherVersion, match=f"version {VERSION + 1}, this worker speaks {VERSION}"):
        check_header(header, 0, Limits())


@pytest.mark.parametrize("kind", Kind)
def test_a_valid_header_is_accepted_up_to_the_limit(kind: Kind) -> None:
    check_header(b"before" + pack_header(kind, 100, 1, 2, 3), 6, Limits(frame=100))
    with pytest.raises(LimitExceeded):
        check_header(pack_header(kind, 101, 1, 2, 3), 0, Limits(frame=100))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown kind 99"):
        check_header(pack_header(99, 0, 1, 0, 0), 0, Limits())


@given(control=st.integers(0, 2**64 - 1), bulk=st.integers(0, 2**64 - 1))
def test_a_ping_round_trips(control: int, bulk: int) -> None:
    assert unpack_ping(pack_ping(control, bulk)) == (control, bulk)


@given(body=st.binary(max_size=40))
def test_a_ping_of_the_wrong_size_is_refused(body: bytes) -> None:
    if len(body) == 16:
        assert all(number >= 0 for number in unpack_ping(body))
    else:
        with pytest.raises(ProtocolError, match="a PING of"):
            unpack_ping(body)


def test_bulk_frames_have_their_own_lane() -> None:
    assert {kind for kind in Kind if lane_of(kind) == BULK} == {Kind.BULK_HEAD, Kind.BULK_CHUNK}


@given(control=st.integers(0, 2**64 - 1), bulk=st.integers(0, 2**64 - 1), cause=st.text(max_size=1000))
def test_a_goodbye_round_trips(control: int, bulk: int, cause: str) -> None:
    assert unpack_goodbye(pack_ping(control, bulk) + cause.encode()) == ((control, bulk), cause)


def test_a_goodbye_that_was_cut_inside_a_character_is_still_readable() -> None:
    assert unpack_goodbye(pack_ping(1, 2) + "é".encode()[:1]) == ((1, 2), "\N{REPLACEMENT CHARACTER}")


def test_a_goodbye_of_the_wrong_size_is_refused() -> None:
    assert unpack_goodbye(pack_ping(1, 2) + b"x" * MAX_CAUSE) == ((1, 2), "x" * MAX_CAUSE)
    with pytest.raises(LimitExceeded, match="a GOODBYE of 4,113 bytes; the limit is 4,112"):
        unpack_goodbye(pack_ping(1, 2) + b"x" * (MAX_CAUSE + 1))
    with pytest.raises(ProtocolError, match="a PING of 5 bytes"):
        unpack_goodbye(b"short")
