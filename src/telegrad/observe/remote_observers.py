"""Serves observers that are not members and have come through the network, after a handshake with the purpose OBSERVE.

They have proved that they know the group's token, as members do. Their number, requests and time are bounded.
"""

from __future__ import annotations

import logging
import threading
from functools import partial

from telegrad.agent.agent import Agent
from telegrad.errors import ProtocolError
from telegrad.observe.answer import answer
from telegrad.observe.attach_protocol import MOST_OBSERVERS, MOST_REQUEST, too_many
from telegrad.observe.remote import LAST, MORE, no_chunks
from telegrad.transport.base import Link, LinkClosed, Listener, Ready
from telegrad.wire.frames import Kind, Limits

_log = logging.getLogger("telegrad")

_IDLE = 120.0  # seconds
_CHUNK = 1 << 20
_LIMITS = Limits(frame=MOST_REQUEST, message=0)


class RemoteObservers(Listener):
    """The remote observers of one worker. The agent closes it as one of its listeners."""

    is_open = False  # not for the poller
    address = ""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._lock = threading.Lock()  # protects _observers
        self._observers: set[_RemoteObserver] = set()
        agent.listeners.append(self)
        agent.peers.observers = self.take

    def take(self, link: Link) -> None:
        """Serve an observer whose handshake is over."""
        observer = _RemoteObserver(self, link)
        with self._lock:
            full = len(self._observers) >= MOST_OBSERVERS
            if not full:
                self._observers.add(observer)
        if full:
            link.owner = None
            link.send(Kind.MESSAGE, LAST + too_many(self.agent.me.name), 0, 0, 0)
            link.close()
            return
        try:
            link.admit(_LIMITS, no_chunks)
            observer.watch()
        except BaseException:
            observer.end("it could not be served")
            raise
        observer.on_ready(Ready.READ)  # what arrived together with the proof

    def discard(self, observer: _RemoteObserver) -> bool:
        """Forget an observer; False if that was done before."""
        with self._lock:
            known = observer in self._observers
            self._observers.discard(observer)
        return known

    def accept(self) -> Link | None:
        """Nothing: observers come through the listeners of the agent."""
        return None

    def close(self) -> None:
        with self._lock:
            observers = list(self._observers)
        for observer in observers:
            observer.end("this worker shuts down")

    def abandon(self) -> None:
        for observer in list(self._observers):
            observer.link.abandon()


class _RemoteObserver:
    """One connection: the owner of its link."""

    def __init__(self, observers: RemoteObservers, link: Link) -> None:
        self._observers = observers
        self._agent = observers.agent
        self._busy = False
        self._last = self._agent.runtime.now()
        self.link = link
        link.owner = self

    def watch(self) -> None:
        """End the connection when it has been idle for long."""
        executor, now = self._agent.executor, self._agent.runtime.now()
        if not self._busy and now - self._last >= _IDLE:
            self.end("it asked nothing for long")
        elif self.link.owner is self:
            executor.timers.at(now + _IDLE / 4, self.watch)

    def on_ready(self, ready: int) -> None:
        """Read a request. Called by the poller."""
        try:
            if ready & Ready.WRITE:
                self.link.flush()
            if ready & Ready.READ:
                for frame in self.link.receive():
                    # Else answers would pile up for an observer that asks and does not read.
                    if frame.kind != Kind.MESSAGE or self._busy or self.link.unsent():
                        raise ProtocolError("an observer sends one request at a time, and reads the answer")
                    self._busy = True
                    self._agent.executor.submit(partial(self._answer, bytes(frame.body)), urgent=True)
            self._agent.poller.arm(self.link, read=True)
        except (LinkClosed, ProtocolError) as error:
            self.end(str(error))

    def _answer(self, request: bytes) -> None:
        data = memoryview(answer(self._agent, request))
        for begin in range(0, len(data), _CHUNK):
            flag = LAST if begin + _CHUNK >= len(data) else MORE
            if flag is LAST:  # not later: the observer may send its next request as soon as it has this
                self._last, self._busy = self._agent.runtime.now(), False
            self.link.send(Kind.MESSAGE, flag + data[begin : begin + _CHUNK], 0, 0, 0)

    def end(self, reason: str) -> None:
        """End the connection."""
        if self._observers.discard(self):
            _log.debug("an observer of worker %r is gone: %s", self._agent.me.name, reason)
            self.link.owner = None
            self.link.close()
