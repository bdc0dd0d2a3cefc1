"""Bounds what connections to the dashboard take: any user of the machine can open them, and needs no token for that.

A connection on which no request is being answered is *idle*. It has `PATIENCE` seconds for its next request, and makes
room for a new connection when there are too many: the oldest goes first. Without the token, requests are refused at
once, so connections that are not idle for long are those of users.

Importing this needs uvicorn, see `telegrad.observe.dashboard.server`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 64
"""Idle connections at once."""
PATIENCE = 10.0


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._came = self.loop.time()
        self._check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for this connection."""
        others = [each for each in self.connections if isinstance(each, BoundedProtocol)]
        idle = sorted((each for each in others if each.is_idle()), key=lambda each: each._came)
        for each in idle[: max(0, len(idle) + 1 - MOST)]:
            each.transport.abort()
            self.connections.discard(each)
        super().connection_made(transport)
        self._check = self.loop.call_later(PATIENCE, self._end_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def is_idle(self) -> bool:
        """Return whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _end_if_idle(self) -> None:
        if self.is_idle():
            self.transport.abort()
        else:
            self._check = self.loop.call_later(PATIENCE, self._end_if_idle)
