"""The header of a connection to a relay: only members make it, and for one worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from telegrad.wire.preamble import check_beginning
from telegrad.wire.relay_header import HEADER_SIZE, RelayHeader, Role, pack_relay_header, unpack_relay_header

KEY, ADDRESS = b"a key of 32 bytes for this group", "tcp://10.0.0.9:29600"
INCARNATIONS = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    RelayHeader,
    st.sampled_from([Role.CALLER, Role.TARGET]),
    INCARNATIONS,
    INCARNATIONS,
    st.binary(min_size=16, max_size=16),
)


@given(HEADERS)
def test_unpacking_returns_what_was_packed(header: RelayHeader) -> None:
    packed = pack_relay_header(KEY, header, ADDRESS)
    assert len(packed) == HEADER_SIZE == check_beginning(packed)
    assert unpack_relay_header(packed, KEY, ADDRESS) == header


@given(HEADERS, st.integers(0, HEADER_SIZE * 8 - 1))
def test_a_header_with_a_flipped_bit_is_not_valid(header: RelayHeader, bit: int) -> None:
    altered = bytearray(pack_relay_header(KEY, header, ADDRESS))
    altered[bit // 8] ^= 1 << bit % 8
    assert unpack_relay_header(bytes(altered), KEY, ADDRESS) is None


@given(HEADERS)
def test_a_header_is_valid_at_one_worker_of_one_group_only(header: RelayHeader) -> None:
    packed = pack_relay_header(KEY, header, ADDRESS)
    assert unpack_relay_header(packed, KEY, "tcp://10.0.0.8:29600") is None
    assert unpack_relay_header(packed, KEY[::-1], ADDRESS) is None


@given(st.binary(max_size=80))
def test_other_bytes_are_no_header(data: bytes) -> None:
    assert unpack_relay_header(data, KEY, ADDRESS) is None
