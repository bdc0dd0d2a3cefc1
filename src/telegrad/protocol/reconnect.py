"""When a session tries to connect, how long it waits between attempts, and when it gives up.

The pauses between attempts double. A connection that broke soon after it was opened counts as a failed attempt, and the
time limit keeps running over a reconnect until a frame gets through. So resuming without progress ends, too.
"""

from __future__ import annotations

from telegrad.protocol.lanes import NEVER
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.session_events import OpenConnection, SessionEffect


class ReconnectSchedule:
    """The attempts of one session to connect. Only the initiator makes any; both sides give up."""

    __slots__ = (
        "_backoff",
        "_connected_at",
        "_initiator",
        "_reason",
        "_refused_since",
        "_settings",
        "attempt_at",
        "give_up_at",
        "is_attempting",
    )

    def __init__(self, reason: str, *, initiator: bool, settings: SessionSettings, now: float) -> None:
        self._reason = reason  # why there is no connection
        self._initiator = initiator
        self._settings = settings
        self._backoff = settings.reconnect_backoff
        self._connected_at = now
        self._refused_since: float | None = None
        self.attempt_at = now if initiator else NEVER
        self.is_attempting = False
        self.give_up_at = now + settings.resume_limit

    def attempt(self) -> list[SessionEffect]:
        """Start an attempt."""
        self.is_attempting = True
        self.attempt_at = NEVER
        return [OpenConnection()]

    def succeeded(self, now: float) -> None:
        """Record that a connection was opened."""
        self.is_attempting = False
        self._refused_since = None
        self._connected_at = now

    def failed(self, now: float) -> None:
        """Record that an attempt reached the peer, but broke."""
        self._refused_since = None
        self._schedule(now)

    def refused(self, now: float) -> bool:
        """Record that nobody listened. Return True if that has lasted so long that the peer is lost."""
        if self._refused_since is None:
            self._refused_since = now
        limit = self._refused_since + self._settings.refuse_limit
        if now >= limit:
            return True
        self._schedule(now)
        self.attempt_at = min(self.attempt_at, limit)
        return False

    def start_limit(self, reason: str, now: float) -> bool:
        """Start the time limit, unless it is running. Return True if it has passed."""
        self._reason = reason
        if self.give_up_at == NEVER:
            self.give_up_at = now + self._settings.resume_limit
            return False
        return now >= self.give_up_at

    def give_up_reason(self) -> str:
        """Return why the session is lost when the time limit has passed."""
        return f"{self._reason}; no frame got through within the resume limit of {self._settings.resume_limit:g} s"

    def resume(self, now: float) -> list[SessionEffect]:
        """Replace a connection that broke: at once, or after a pause if it was short-lived."""
        if not self._initiator:
            return []
        if now - self._connected_at < self._settings.reconnect_backoff_limit:
            self._schedule(now)
            return []
        self._backoff = self._settings.reconnect_backoff
        return self.attempt()

    def stop(self) -> None:
        """Make no more attempts."""
        self.is_attempting = False
        self.attempt_at = NEVER
        self.give_up_at = NEVER

    def _schedule(self, now: float) -> None:
        self.is_attempting = False
        self.attempt_at = now + self._backoff
        self._backoff = min(2 * self._backoff, self._settings.reconnect_backoff_limit)
