"""Logs refused connections: the first of each kind one by one, and then one summary per INTERVAL seconds.

A flood must not fill the log, and must not hide the one line that matters: each kind of refusal has its own first
lines, so a member with a wrong token is found among any number of strangers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from enum import Enum

from telegrad.connection.local_worker import LocalWorker
from telegrad.execution.timers import Timer

_log = logging.getLogger("telegrad")

INTERVAL = 10.0
"""Seconds that one summary covers."""
FIRST = 5
"""How many refusals of one kind are logged with all details, per interval."""
MAX_SOURCES = 64
"""How many addresses are counted."""
MANY_LEFT = 100
"""How many connections that ended by themselves are worth a line: port scans and health checks are not."""


class Refusal(Enum):
    """Why a connection was refused, as a summary says it."""

    LEFT = "closed without a handshake"  # by themselves, or because they were silent in a long backlog
    EVICTED = "evicted without a valid Hello"
    NOT_TELEGRAD = "sent something else than a handshake"
    LATE = "sent no proof in time"
    QUESTION = "asked, before they join, what this worker denied"  # such as its vote: they are told, and log it
    TOKEN = "did not prove that they know the group token"
    OTHER = "refused for another reason"


_QUIET = (Refusal.LEFT, Refusal.QUESTION)


class RefusalLog:
    """Counts and logs the connections that one worker refused."""

    def __init__(self, local: LocalWorker) -> None:
        self._local = local
        self._lock = threading.Lock()  # protects all below
        self._counts: dict[Refusal, int] = {}
        self._sources: set[str] = set()
        self._began = 0.0
        self._timer: Timer | None = None
        self._closed = False

    def add(self, kind: Refusal, source: str, peer: str, reason: str) -> None:
        """Log that a connection from `peer` was refused, or count it."""
        count = self._count(kind, source, 1)
        if kind is Refusal.LEFT:
            _log.debug("worker %r: %s left during its handshake: %s", self._local.name, peer, reason)
        elif kind is Refusal.QUESTION:
            _log.debug("worker %r answers no to %s: %s", self._local.name, peer, reason)
        elif count <= FIRST:
            more = ". More like this are counted, and logged together" if count == FIRST else ""
            _log.warning("worker %r refused a connection from %s: %s%s", self._local.name, peer, reason, more)

    def add_dropped(self, counts: Mapping[str, int]) -> None:
        """Count connections that the listener dropped, by their source."""
        for source, count in counts.items():
            self._count(Refusal.LEFT, source, count)

    def _count(self, kind: Refusal, source: str, more: int) -> int:
        with self._lock:
            count = self._counts[kind] = self._counts.get(kind, 0) + more
            if len(self._sources) <= MAX_SOURCES:
                self._sources.add(source)
            if self._timer is None and not self._closed:
                self._began = self._local.runtime.now()
                self._timer = self._local.executor.timers.at(self._began + INTERVAL, self.flush)
            return count

    def flush(self) -> None:
        """Log what was counted and not logged yet, and begin anew."""
        with self._lock:
            counts, sources, timer = self._counts, self._sources, self._timer
            seconds = self._local.runtime.now() - self._began
            self._counts, self._sources, self._timer = {}, set(), None
        if timer is not None:
            self._local.executor.timers.cancel(timer)
        if all(count <= (MANY_LEFT if kind in _QUIET else FIRST) for kind, count in counts.items()):
            return
        addresses = f"{len(sources)} address{'es' if len(sources) > 1 else ''}"
        if len(sources) > MAX_SOURCES:
            addresses = f"more than {MAX_SOURCES} addresses"
        _log.warning(
            "worker %r refused %s connections from %s in the last %.3g s: %s",
            self._local.name,
            f"{sum(counts.values()):,}",
            addresses,
            seconds,
            ", ".join(f"{counts[kind]:,} {kind.value}" for kind in Refusal if kind in counts),
        )

    def close(self) -> None:
        """Log what is left, and set no more timers."""
        with self._lock:
            self._closed = True
        self.flush()
