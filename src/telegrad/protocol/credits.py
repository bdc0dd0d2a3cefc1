"""How many requests may be under way in one calling direction: each side counts, and both come to the same.

Only requests are bounded. Replies, gradients, answers and acks never are, and neither are nested requests, made while
serving another call: each of two workers could wait for a credit that only the end of the other's outer call gives
back.
"""

from __future__ import annotations

from telegrad.errors import ProtocolError, TelegradError
from telegrad.protocol.limits import SessionSettings


class Credits:
    """One side's books: what it has asked of its peer (`ask`, `done`), and what it serves (`arrived`, `answered`).

    >>> credits = Credits(SessionSettings(request_credits=1))
    >>> credits.ask(100), credits.ask(1)
    (True, False)
    >>> credits.done(100)
    >>> credits.ask(1)
    True
    """

    __slots__ = ("_asked", "_asked_bytes", "_max_bytes", "_max_requests", "_peer", "_serving", "_serving_bytes")

    def __init__(self, settings: SessionSettings, peer: str = "the peer") -> None:
        self._max_requests = settings.request_credits
        self._max_bytes = settings.request_bytes
        self._peer = peer
        self._asked = self._asked_bytes = 0
        self._serving = self._serving_bytes = 0

    def ask(self, size: int) -> bool:
        """Take credits for a request of `size` bytes that is not nested; False: there are none now."""
        asked = self._asked
        # A request above the limit could never pass if it had to fit: it passes alone.
        if asked and (asked >= self._max_requests or self._asked_bytes + size > self._max_bytes):
            return False
        self._asked = asked + 1
        self._asked_bytes += size
        return True

    def done(self, size: int) -> None:
        """Give back what `ask` took: the reply came."""
        if self._asked < 1 or self._asked_bytes < size:
            raise ProtocolError(f"{self._peer} answered more than it was asked")
        self._asked -= 1
        self._asked_bytes -= size

    def arrived(self, size: int) -> None:
        """Hold the peer to the bound that it holds itself to. Not for nested requests."""
        serving = self._serving
        if serving and (serving >= self._max_requests or self._serving_bytes + size > self._max_bytes):
            raise ProtocolError(
                f"{self._peer} sent a request of {size} bytes beyond its credits: {serving} requests of "
                f"{self._serving_bytes} bytes are unanswered, and the limits here are {self._max_requests} and "
                f"{self._max_bytes}; every worker needs the same ones"
            )
        self._serving = serving + 1
        self._serving_bytes += size

    def answered(self, size: int) -> None:
        """Give back what `arrived` took. Call it before the reply leaves, or the peer seems to overdraw."""
        if self._serving < 1 or self._serving_bytes < size:
            raise TelegradError(f"more requests of {self._peer} were answered than came; this is a bug in telegrad")
        self._serving -= 1
        self._serving_bytes -= size
