"""Runs the timers of a session, and applies the effects that the session asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from telegrad.execution.timers import Timer
from telegrad.protocol.session_events import (
    CloseConnection,
    OpenConnection,
    SendAck,
    SendPing,
    SessionEffect,
    SessionLost,
)
from telegrad.wire.frames import Kind, pack_ping

if TYPE_CHECKING:
    from telegrad.connection.channel import Channel


class SessionDriver:
    """Calls `Session.tick` when it is due, and sends the acks and pings that result."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._local = channel.local
        self._peers = channel.peers
        self._session = channel.session
        self._lock = channel.lock  # also protects _timer
        self._timer: Timer | None = None

    def schedule(self) -> None:
        """Have `tick` called when the session next has something to do."""
        with self._lock:
            due = self._session.next_tick()
            timer = self._timer
            if timer is not None and timer.action is not None:
                if due is not None and timer.when <= due:
                    return
                self._timer = None
                self._local.executor.timers.cancel(timer)
            if due is not None:
                self._timer = self._local.executor.timers.at(due, self.tick)

    def tick(self) -> None:
        """Do what is due in the session."""
        readers = self._channel.readers
        with self._lock:
            effects = self._session.tick(self._local.runtime.now())
            readers.idle = True
            if not readers.reading and not readers.armed:
                readers.elect()
        try:
            self.apply(effects)
        finally:
            self.schedule()

    def apply(self, effects: list[SessionEffect]) -> None:
        """Do what the session asks for."""
        channel = self._channel
        for effect in effects:
            match effect:
                case SendAck():
                    self._send_unsequenced(Kind.ACK)
                case SendPing():
                    self._send_unsequenced(Kind.PING)
                case CloseConnection(reason):
                    channel.cut(reason)
                case OpenConnection():
                    self._peers.lost_workers.reconnect(channel)
                case SessionLost(reason):
                    self._peers.lost_workers.session_lost(channel, reason)

    def _send_unsequenced(self, kind: Kind) -> None:
        with self._lock:
            link = self._channel.link
            if link is not None:
                body = b"" if kind == Kind.ACK else pack_ping(*self._session.sent_up_to())
                link.send(kind, body, 0, *self._session.acks())

    def stop(self) -> None:
        """Cancel the timer. Call with the lock held."""
        if self._timer is not None:
            self._local.executor.timers.cancel(self._timer)
            self._timer = None
