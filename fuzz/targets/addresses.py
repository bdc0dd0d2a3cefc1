"""Addresses, as they stand in the rendezvous store and in a Hello."""

from __future__ import annotations

from collections.abc import Iterable

from fuzz.target import Target
from telegrad.transport.addresses import parse_address


def _run(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    address = parse_address(text)
    assert parse_address(str(address)) == address
    assert 0 <= address.port <= 0xFFFF


def _seeds() -> Iterable[bytes]:
    texts = ("tcp://host:1", "tcp://[fe80::1%eth0]:65535", "tcp://127.0.0.1:0", "unix:///run/a.sock", "memory://a/b")
    return [text.encode() for text in texts]


ADDRESSES = Target("addresses", _run, (ValueError,), _seeds, max_size=512)
