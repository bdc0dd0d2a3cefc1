"""Checks the preambles of incoming TLS connections. Each opens one connection only.

Whoever reads a preamble on the network can repeat it. It would gain a TLS handshake, which costs the listener half a
millisecond, but no more: it does not know the token. So the listener remembers the last MAX_USED preambles, and a
repeated one is refused like a forged one. Somebody who has recorded more than that, or who is faster than the member
from whom it has the preamble, gets one TLS handshake for each.
"""

from __future__ import annotations

import threading

from telegrad.errors import AuthenticationError
from telegrad.wire.preamble import PREAMBLE_SIZE, is_valid_preamble
from telegrad.wire.relay_header import HEADER_SIZE, RELAY_BEGINNING, RelayHeader, unpack_relay_header

MAX_USED = 8192
"""How many preambles a listener remembers: about 1 MB."""


class PreambleVerifier:
    """Knows which preambles are valid at a listener that announces `address`."""

    def __init__(self, key: bytes, address: str) -> None:
        self._key = key
        self._address = address
        self._lock = threading.Lock()  # protects _used
        self._used: dict[bytes, None] = {}  # oldest first

    def is_valid_beginning(self, first: bytes) -> bool:
        """Return whether a connection begins with what `use` would accept now."""
        if first.startswith(RELAY_BEGINNING):
            preamble = first[:HEADER_SIZE]
            valid = unpack_relay_header(preamble, self._key, self._address) is not None
        else:
            preamble = first[:PREAMBLE_SIZE]
            valid = is_valid_preamble(preamble, self._key, self._address)
        return valid and preamble not in self._used

    def use(self, preamble: bytes) -> RelayHeader | None:
        """Accept a preamble once. Raises an AuthenticationError if it is not valid.

        Returns what it says if it is the header of a connection that is to be relayed.
        """
        relayed = unpack_relay_header(preamble, self._key, self._address)
        if relayed is None and not is_valid_preamble(preamble, self._key, self._address):
            raise AuthenticationError(
                "its preamble is not valid; the group tokens differ, or it dialled another address than "
                f"{self._address}, or it is not a worker"
            )
        with self._lock:
            if preamble in self._used:
                raise AuthenticationError("its preamble was used before: somebody repeats what it recorded")
            self._used[preamble] = None
            if len(self._used) > MAX_USED:
                del self._used[next(iter(self._used))]
        return relayed
