"""Flow control for requests: how many may be in flight in one calling direction. Both sides count the same.

Only requests are bounded. Replies, gradients and acknowledgements never are, and neither are nested requests, which are
made while serving another call: each of two workers could wait for a credit that only the end of the other's outer call
gives back. Nor are the calls of collectives, which last until all members have come: those that came early could hold
the credits that the last one needs. Calls on an ordered object are numbered, and the owner runs none before the one
with the number before it has come. So the caller takes the credit of such a call before its number: otherwise those
with later numbers could hold all credits while it waits for one. Its size is not known by then, so only the caller
counts it.
"""

from __future__ import annotations

from telegrad.errors import ProtocolError, TelegradError
from telegrad.protocol.limits import SessionSettings


class Credits:
    """One side's counts: requests it has sent (`acquire`, `release`) and requests it serves (`admit`, `complete`).

    >>> credits = Credits(SessionSettings(request_credits=1))
    >>> credits.acquire(100), credits.acquire(1)
    (True, False)
    >>> credits.release(100)
    >>> credits.acquire(1)
    True
    """

    __slots__ = ("_in_flight", "_in_flight_bytes", "_max_bytes", "_max_requests", "_peer", "_serving", "_serving_bytes")

    def __init__(self, settings: SessionSettings, peer: str = "the peer") -> None:
        self._max_requests = settings.request_credits
        self._max_bytes = settings.request_bytes
        self._peer = peer
        self._in_flight = self._in_flight_bytes = 0
        self._serving = self._serving_bytes = 0

    def acquire(self, size: int) -> bool:
        """Take credits for a request of `size` bytes that is not nested. Return False if there are none now."""
        in_flight = self._in_flight
        # A request above the limit could never be sent if it had to fit: it is sent when no other is in flight.
        if in_flight and (in_flight >= self._max_requests or self._in_flight_bytes + size > self._max_bytes):
            return False
        self._in_flight = in_flight + 1
        self._in_flight_bytes += size
        return True

    def extend(self, size: int) -> None:
        """Count `size` bytes more for a request that has credits, also beyond the limit."""
        self._in_flight_bytes += size

    def release(self, size: int) -> None:
        """Give back what `acquire` took: the reply was received."""
        if self._in_flight < 1 or self._in_flight_bytes < size:
            raise ProtocolError(f"{self._peer} sent more replies than it got requests")
        self._in_flight -= 1
        self._in_flight_bytes -= size

    def admit(self, size: int) -> None:
        """Count a request that was received, and check the peer's limit. Not for nested requests."""
        serving = self._serving
        if serving and (serving >= self._max_requests or self._serving_bytes + size > self._max_bytes):
            raise ProtocolError(
                f"{self._peer} sent a request of {size} bytes beyond its credits: {serving} requests of "
                f"{self._serving_bytes} bytes have no reply yet, and the limits here are {self._max_requests} and "
                f"{self._max_bytes}; set the same limits on every worker"
            )
        self._serving = serving + 1
        self._serving_bytes += size

    def complete(self, size: int) -> None:
        """Give back what `admit` took. Call it before the reply is sent, or the peer seems to exceed its credits."""
        if self._serving < 1 or self._serving_bytes < size:
            raise TelegradError(f"more replies than requests for {self._peer}; this is a bug in telegrad")
        self._serving -= 1
        self._serving_bytes -= size

    def in_use(self) -> tuple[int, int]:
        """Return how many requests that are not nested are in flight, and how many are served; for tests."""
        return self._in_flight, self._serving
