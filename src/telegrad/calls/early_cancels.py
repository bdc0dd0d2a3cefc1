"""Cancellations of calls that are not known: they may have overtaken a large request, or the call was answered."""

from __future__ import annotations

import threading

from telegrad.connection.channel import Channel

_MOST = 256
"""How many are remembered, of all callers together."""


class EarlyCancels:
    """The cancellations that arrived before their calls, as far as they are remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects `reasons`
        self.reasons: dict[tuple[Channel, int], str] = {}
        """Why each was cancelled, oldest first. To be read only."""

    def add(self, channel: Channel, call: int, reason: str) -> None:
        """Remember that a call was cancelled. Not if its caller is gone: no more calls come, nor another `forget`."""
        with self._lock:
            if not channel.session.state.is_over:
                self.reasons[channel, call] = reason
                if len(self.reasons) > _MOST:
                    del self.reasons[next(iter(self.reasons))]

    def take(self, channel: Channel, call: int) -> str:
        """Return why a call that has arrived was cancelled; empty if it was not."""
        with self._lock:
            return self.reasons.pop((channel, call), "")

    def forget(self, channel: Channel) -> None:
        """Forget what came on the channel of a caller that is gone."""
        with self._lock:
            for key in [key for key in self.reasons if key[0] is channel]:
                del self.reasons[key]
