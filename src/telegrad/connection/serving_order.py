"""In which order the connections that sent something are read while they are in their handshake.

Those with a valid preamble or Hello come first: they belong to members, most likely. Among the others, sources take
turns, so that a flood from one address does not delay a member at another.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class _Queued(Protocol):
    source: str


T = TypeVar("T", bound=_Queued)


class ServingOrder(Generic[T]):
    """Queues of connections: one of members, and one for each other source."""

    def __init__(self) -> None:
        self._members: deque[T] = deque()
        self._sources: dict[str, deque[T]] = {}  # the next one first

    def add(self, connection: T, *, is_member: bool) -> None:
        """Queue a connection."""
        (self._members if is_member else self._sources.setdefault(connection.source, deque())).append(connection)

    def take(self) -> T | None:
        """Remove and return the next connection."""
        if self._members:
            return self._members.popleft()
        for source, queue in self._sources.items():
            connection = queue.popleft()
            del self._sources[source]
            if queue:
                self._sources[source] = queue  # as the last one
            return connection
        return None

    def remove(self, connection: T) -> None:
        """Remove a queued connection."""
        queue = self._sources.get(connection.source)
        if queue is None or connection not in queue:
            self._members.remove(connection)
            return
        queue.remove(connection)
        if not queue:
            del self._sources[connection.source]

    def __bool__(self) -> bool:
        return bool(self._members or self._sources)
