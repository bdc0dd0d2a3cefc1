"""Looks at the group again and again, and hands what it sees to every browser that is connected.

One thread gathers. It looks every `interval` seconds while somebody watches, and every `IDLE` seconds otherwise, so
that the plots have no gap. Every update is encoded once for all browsers. A browser that does not keep up misses
updates and gets the whole state instead; nothing piles up for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from telegrad.errors import TelegradError
from telegrad.observe.dashboard.graphs import Graph, Graphs
from telegrad.observe.dashboard.history import SPAN, History, Point
from telegrad.observe.dashboard.snapshot import Snapshot, snapshot
from telegrad.observe.dashboard.spans import SECONDS, Span, Spans
from telegrad.observe.model import EventPosition, GroupView

_log = logging.getLogger("telegrad")

Gather = Callable[[dict[str, EventPosition]], GroupView]
"""Returns a view of the group, with the events of each worker from the number that is given for it."""
Analyse = Callable[[GroupView], Any]
"""Returns what is stuck in a view, see `telegrad.observe.dashboard.stuck_tree`."""

FASTEST = 0.2
"""Seconds between two looks at least."""
IDLE = 2.0
BACKLOG = 4
"""Updates that wait for a slow browser."""


class Update(msgspec.Struct, frozen=True):
    """What is new since the update before."""

    snapshot: Snapshot
    spans: list[Span]
    graphs: list[Graph]
    point: Point | None


class State(msgspec.Struct, frozen=True):
    """All that a browser needs to begin with."""

    snapshot: Snapshot | None
    spans: list[Span]
    graphs: list[Graph]
    points: list[Point]
    span_seconds: float
    history_seconds: float
    error: str = ""


class Subscriber:
    """One connected browser. All methods but `offer` belong to its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(BACKLOG)

    def offer(self, message: bytes | None) -> None:
        """Hand an update over, from any thread. None: the feed is closed."""
        try:
            self._loop.call_soon_threadsafe(self._put, message)
        except RuntimeError:
            _log.debug("a browser's event loop was closed before it took the last update")

    def _put(self, message: bytes | None) -> None:
        if self._queue.full():
            while not self._queue.empty():
                self._queue.get_nowait()
            if message is not None:
                message = b""  # it has missed some: it needs the whole state
        self._queue.put_nowait(message)

    async def next(self) -> bytes | None:
        """Wait for the next update. Empty: updates were missed. None: there will be no more. Ends with the feed."""
        return await self._queue.get()


class Feed:
    """The thread that gathers, and who gets what it gathers."""

    def __init__(
        self,
        gather: Gather,
        analyse: Analyse | None = None,
        interval: float = 0.5,
        on_view: Callable[[GroupView], None] | None = None,
    ) -> None:
        self._gather, self._analyse, self._on_view = gather, analyse, on_view
        self._interval = max(FASTEST, interval)
        self._history, self._spans, self._graphs = History(), Spans(), Graphs()
        self._positions: dict[str, EventPosition] = {}
        self._error = ""
        self._lock = threading.Lock()  # protects the fields below, and all of the above while they are changed or read
        self._view: GroupView | None = None
        self._snapshot: Snapshot | None = None
        self._subscribers: set[Subscriber] = set()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="telegrad-dashboard-feed", daemon=True)

    def start(self) -> None:
        """Begin to look at the group."""
        self._thread.start()

    def close(self, timeout: float = 30.0) -> None:
        """Stop looking, and tell all browsers."""
        with self._lock:
            self._closed = True
            subscribers, self._subscribers = self._subscribers, set()
        self._wake.set()
        for subscriber in subscribers:
            subscriber.offer(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def subscribe(self) -> Subscriber:
        """Add a browser. Called on its event loop."""
        subscriber = Subscriber()
        with self._lock:
            closed = self._closed
            self._subscribers.add(subscriber)
        if closed:
            subscriber.offer(None)
        self._wake.set()
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Remove a browser."""
        with self._lock:
            self._subscribers.discard(subscriber)

    def state(self) -> bytes:
        """Return the whole state, encoded."""
        with self._lock:
            return msgspec.json.encode(
                State(
                    self._snapshot,
                    list(self._spans.kept),
                    self._graphs.all(),
                    list(self._history.points),
                    SECONDS,
                    SPAN,
                    self._error,
                )
            )

    def view(self) -> GroupView | None:
        """Return the last view of the group."""
        with self._lock:
            return self._view

    def look(self) -> None:
        """Look at the group once, and tell all browsers."""
        view = self._gather(dict(self._positions))
        stuck = self._analyse(view) if self._analyse is not None else None
        if self._on_view is not None:
            self._on_view(view)
        with self._lock:
            self._error = ""
            self._view = view
            self._positions.update({worker.name: worker.position() for worker in view.workers})
            point = self._history.add(view)
            spans = self._spans.add(view)
            graphs = self._graphs.add(view)
            self._snapshot = snapshot(view, self._history.rates, stuck)
            message = msgspec.json.encode(Update(self._snapshot, spans, graphs, point))
        self._publish(message)

    def _publish(self, message: bytes) -> None:
        with self._lock:
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            subscriber.offer(message)

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - the page shows it, and the next look may succeed
                _log.debug("cannot look at the group", exc_info=True)
                with self._lock:
                    self._error = str(error) if isinstance(error, TelegradError) else f"{type(error).__name__}: {error}"
                self._publish(b"")
            with self._lock:
                watched = bool(self._subscribers)
            self._wake.wait(self._interval if watched else IDLE)
            # A browser that connects is served at once, but many of them cannot make the feed look more often.
            if self._wake.is_set() and not self._pause():
                return

    def _pause(self) -> bool:
        """Keep the distance between two looks, and return whether to go on."""
        self._wake.clear()
        with self._lock:
            if self._closed:
                return False
        self._wake.wait(FASTEST)
        with self._lock:
            return not self._closed
