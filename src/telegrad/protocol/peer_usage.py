"""What one peer uses of this worker, checked against its limits.

1. Whatever is taken (`take_call`, `take_bytes`) is given back once, with `give_back`.
2. What would exceed a limit is not taken. The result says which limit, and when it is worth a retry.
3. Calls per second are a token bucket: it holds `burst` tokens, and fills at the rate of the limit.
4. Refusals cost this worker time, too. Each takes a token from a second bucket, and a large message that has to be
   read and discarded takes more. When that bucket is empty, the peer has to be disconnected.

Times are arguments, in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from telegrad.protocol.peer_limits import PeerLimits

MESSAGE_OVERHEAD = 512
"""Bytes that each message counts on top of its size, for the objects that represent it."""
REFUSALS_PER_SECOND = 100
REFUSALS_AT_ONCE = 1000
"""Refusals that are tolerated, if the calls per second are not limited."""
DISCARDED_PER_TOKEN = 1 << 20
"""Bytes to read and discard that cost as much as a refusal."""
UNREAD_MARGIN = 1.25
"""How far replies that a peer does not read may exceed `bytes_held` before it is disconnected."""


@dataclass(frozen=True)
class Excess:
    """A limit that would be exceeded."""

    limit: str
    """The name of the limit, a field of `PeerLimits`."""
    allowed: float
    wanted: float
    """What would be used, had it been admitted."""
    retry_after: float | None = None
    """Seconds after which a retry may succeed; None if that does not depend on time alone."""
    permanent: bool = False
    """Whether a retry can never succeed."""


class TokenBucket:
    """Holds up to `capacity` tokens, and gets `rate` new ones per second.

    >>> bucket = TokenBucket(rate=10, capacity=1, now=0.0)
    >>> bucket.take(1, now=0.0), bucket.take(1, now=0.0)
    (0.0, 0.1)
    >>> bucket.take(1, now=0.1)
    0.0
    """

    __slots__ = ("_at", "_capacity", "_rate", "_tokens")

    def __init__(self, rate: float, capacity: float, now: float) -> None:
        self._rate = rate
        self._capacity = self._tokens = capacity
        self._at = now

    def take(self, count: float, now: float) -> float:
        """Take tokens, or return after how many seconds there will be enough. 0 means that they were taken."""
        if self._tokens == math.inf:
            return 0.0
        elapsed = now - self._at
        if elapsed > 0:  # a clock that went back gives nothing
            self._tokens = min(self._capacity, self._tokens + elapsed * self._rate)
            self._at = now
        missing = count - self._tokens
        if missing > 1e-9:
            return missing / self._rate
        self._tokens -= count
        return 0.0


class PeerUsage:
    """The usage of one peer. `limits` has a number in every field.

    >>> usage = PeerUsage(PeerLimits(calls=1).or_else(PeerLimits()), now=0.0)
    >>> usage.take_call(100, 0.0), usage.take_call(100, 0.0).limit
    (None, 'calls')
    >>> usage.give_back(1, 100)
    >>> usage.is_empty()
    True
    """

    __slots__ = ("_bytes", "_calls", "_rate", "_refusals", "limits")

    def __init__(self, limits: PeerLimits, now: float) -> None:
        self.limits = limits
        self._calls = 0
        self._bytes = 0
        rate, burst = limits.calls_per_second or math.inf, limits.burst or math.inf
        self._rate = TokenBucket(rate, burst, now)
        limited = rate < math.inf
        self._refusals = TokenBucket(
            max(1.0, rate / 2) if limited else REFUSALS_PER_SECOND,
            max(100.0, 2 * burst) if limited and burst < math.inf else REFUSALS_AT_ONCE,
            now,
        )

    @property
    def calls(self) -> int:
        """Calls that are queued or run."""
        return self._calls

    @property
    def bytes_held(self) -> int:
        """Bytes of messages that are held, without replies that the peer has not read."""
        return self._bytes

    def is_empty(self) -> bool:
        """Return whether everything was given back."""
        return self._calls == 0 and self._bytes == 0

    def take_call(self, size: int, now: float, unread: int = 0) -> Excess | None:
        """Take a call whose request has `size` bytes. `unread` are the bytes of replies that the peer has not read.

        A size of 0 means that the bytes were taken before.
        """
        limits = self.limits
        if self._calls + 1 > _number(limits.calls):
            return Excess("calls", _number(limits.calls), self._calls + 1)
        excess = self._bytes_excess(size, unread)
        if excess is None:
            wait = self._rate.take(1, now)
            if not wait:
                self._calls += 1
                self._bytes += size
                return None
            excess = Excess("calls_per_second", _number(limits.calls_per_second), math.nan, wait)
        return excess

    def take_bytes(self, size: int, unread: int = 0) -> Excess | None:
        """Take the bytes of a message."""
        excess = self._bytes_excess(size, unread)
        if excess is None:
            self._bytes += size
        return excess

    def size_excess(self, size: int) -> Excess | None:
        """Check the size of one message."""
        most = _number(self.limits.message_size)
        return Excess("message_size", most, size, permanent=True) if size > most else None

    def _bytes_excess(self, size: int, unread: int) -> Excess | None:
        total = self._bytes + size + unread
        if total > _number(self.limits.bytes_held):
            return Excess("bytes_held", _number(self.limits.bytes_held), total)
        return None

    def unread_excess(self, unread: int) -> Excess | None:
        """Check whether another reply may be queued behind `unread` bytes that the peer has not read."""
        most = _number(self.limits.bytes_held)
        return Excess("bytes_held", most, unread) if unread > most else None

    def is_stuck(self, unread: int) -> bool:
        """Return whether a peer with this many unread bytes has to be disconnected."""
        return unread > UNREAD_MARGIN * _number(self.limits.bytes_held)

    def count_excess(self, limit: str, wanted: int) -> Excess | None:
        """Check a count that is kept elsewhere: `contexts`, `calls_per_context` or `references`."""
        most = _number(getattr(self.limits, limit))
        return Excess(limit, most, wanted) if wanted > most else None

    def give_back(self, calls: int, size: int) -> None:
        """Give back calls and bytes that were taken."""
        self._calls -= calls
        self._bytes -= size

    def refused(self, now: float, discarded: int = 0) -> bool:
        """Count a refusal, and `discarded` bytes read for it. Return whether the peer has to be disconnected."""
        return self._refusals.take(1 + discarded / DISCARDED_PER_TOKEN, now) > 0


def _number(limit: float | None) -> float:
    return math.inf if limit is None else limit
