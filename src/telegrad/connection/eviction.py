"""Chooses which incoming connection makes room for the next one, while many are in their handshake.

1. A connection that has sent a valid Hello, or with TLS a valid preamble, belongs to a member, most likely. It is not
   evicted before MEMBER_TIME.
2. Among the others, the source address with the most connections loses one. So a member at another address than the
   flood keeps its connection.
3. Of one source, silent connections go first, then those whose unfinished message was read, then those with unread
   bytes; the oldest of each kind first. A member sends its first message as soon as it is connected.
4. Every connection has a moment before it may be evicted. The moment is longer while no source has more than half of
   the places: then many members may be connecting at once.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

SILENT, WAITING, UNREAD, GREETED = range(4)
"""What a connection has sent: nothing; no whole message, and all was read; unread bytes; a valid preamble or Hello."""

MEMBER_TIME = 1.0
"""Seconds for which a connection that has sent a valid preamble or Hello is not evicted."""
FLOODED_TIMES = (0.004, 0.004, 0.02)
"""Seconds for which a silent, waiting or unread connection is not evicted if its source has most of the places."""
CROWDED_TIMES = (0.1, 0.25, 1.0)
"""The same if no source has most of the places."""


class _Evictable(Protocol):
    source: str
    stage: int
    accepted_at: float


T = TypeVar("T", bound=_Evictable)


class EvictionOrder(Generic[T]):
    """The connections in their handshake, by source."""

    def __init__(self) -> None:
        self._sources: dict[str, dict[T, None]] = {}  # each in the order of acceptance, without the next
        self._greeted: dict[T, None] = {}

    def add(self, connection: T) -> None:
        """Add a connection that was just accepted."""
        self._sources.setdefault(connection.source, {})[connection] = None

    def greeted(self, connection: T) -> None:
        """Record that a connection has sent a valid preamble or Hello."""
        self.discard(connection)
        self._greeted[connection] = None

    def discard(self, connection: T) -> None:
        """Forget a connection."""
        self._greeted.pop(connection, None)
        of_source = self._sources.get(connection.source)
        if of_source is not None:
            of_source.pop(connection, None)
            if not of_source:
                del self._sources[connection.source]

    def __iter__(self) -> Iterator[T]:
        for of_source in self._sources.values():
            yield from of_source
        yield from self._greeted

    def victim(self, now: float, places: int) -> T | None:
        """Return the connection to evict, if `places` are all taken; None if each has to be given more time."""
        largest = max(self._sources.values(), key=len, default=None)
        if largest is not None:
            times = FLOODED_TIMES if 2 * len(largest) > places else CROWDED_TIMES
            found = self._first(largest, now, times)
            if found is not None:
                return found
        oldest = next(iter(self._greeted), None)
        return oldest if oldest is not None and now - oldest.accepted_at >= MEMBER_TIME else None

    def has_strangers(self) -> bool:
        """Return whether there is a connection that has sent no valid preamble or Hello."""
        return bool(self._sources)

    def stranger(self, now: float) -> T | None:
        """Return the connection to evict if the process has no file descriptor left."""
        largest = max(self._sources.values(), key=len, default=None)
        return None if largest is None else self._first(largest, now, FLOODED_TIMES)

    def _first(self, connections: dict[T, None], now: float, times: tuple[float, ...]) -> T | None:
        best: T | None = None
        for connection in connections:
            if best is not None and connection.stage >= best.stage:
                continue
            if now - connection.accepted_at >= times[connection.stage]:
                if connection.stage == SILENT:
                    return connection
                best = connection
        return best


def source_of(peer: str) -> str:
    """Return what connections from one place have in common: an IPv4 address, or an IPv6 network of 64 bits.

    >>> source_of("10.0.0.9:53122"), source_of("2001:db8::7:53122"), source_of("pid 17")
    ('10.0.0.9', '2001:db8::/64', 'pid 17')
    """
    host, colon, _ = peer.rpartition(":")
    if not colon:
        return peer
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
