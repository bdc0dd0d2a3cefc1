"""Decides which thread reads the link of a channel: a thread that waits for a message, or the poller.

The thread that waits for a reply reads the link itself: it *leads*. Threads that wait for other replies on the same
channel *follow*, and one of them leads next. The poller reads only while no thread waits and replies are due to
futures. So a plain call needs no handoff between threads on the caller's side.

Between calls in quick succession no thread reads the pings and acks of a resumable session. The next call does, or the
poller from the session's next tick on: arming and disarming the poller for every call would cost more than it gains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from telegrad.transport.base import Link
from telegrad.waiting import Event

if TYPE_CHECKING:
    from telegrad.connection.channel import Channel


class Reader(Protocol):
    """A thread that waits for a message on a channel: for the reply to a call, or for a one-way message."""

    event: Event | None
    """Set when the thread may lead, or need not wait any longer. None unless the thread follows."""
    leading: int
    """The thread's id while it leads, else 0."""

    def done(self) -> bool:
        """Return whether the thread need not wait any longer."""


class ReaderElection:
    """Elects the one reader of a channel's link. All state is protected by the channel's lock."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._local = channel.local
        self._lock = channel.lock
        self._outgoing = channel.outgoing
        self._resumable = channel.resumable
        self.unwaited = 0
        """Calls in progress whose reply no thread waits for."""
        self.reading = False
        self.armed = False
        """Whether the poller reports when the link can be read."""
        self.reported = False
        """Whether the poller has reported the link. It reports an outgoing link once per arming."""
        self.idle = True
        """Whether no call was made since the session's last tick."""
        self._always_polled = False
        self._followers: list[Reader] = []  # few, so a list takes less memory

    def lead(self, reader: Reader, thread: int) -> Link | None:
        """Make `thread` the reader and return the link. If it cannot lead now, `reader.event` is set when it may."""
        with self._lock:
            link = self._channel.link
            if self.reading or link is None:
                reader.event = self._local.runtime.event()
                self._followers.append(reader)
                return None
            reader.event = None
            reader.leading = thread  # before the next line: a thread interrupted after that line must stop leading
            self.reading = True
            self.idle = False
            if self.armed:
                self.armed = False
                self._local.poller.arm(link, read=False)
            return link

    def stop_leading(self, reader: Reader) -> None:
        """Let another thread read."""
        reader.leading = 0
        with self._lock:
            self.reading = False
            # If all of these are false, nobody is to be woken, and the poller is not armed and need not be.
            if (
                self._followers
                or self.unwaited
                or self.armed
                or self.reported
                or self._always_polled
                or self._resumable
            ):
                self.elect()

    def stop_following(self, reader: Reader) -> None:
        """Stop waiting for the thread that reads."""
        with self._lock:
            reader.event = None
            if reader in self._followers:
                self._followers.remove(reader)
            elif not self.reading:
                self.elect()  # `reader` was elected but does not want to lead

    def stop_polled_read(self) -> None:
        """Let another thread read, after the poller's thread did."""
        with self._lock:
            self.reading = False
            if self._outgoing or self._followers:
                self.elect()

    def elect(self) -> None:
        """Wake a follower, or arm the poller if messages are due. Call with the lock held, while no thread reads."""
        while self._followers:
            reader = self._followers.pop(0)
            if not reader.done() and reader.event is not None:
                reader.event.set()
                return
        link = self._channel.link
        if self._outgoing and link is not None:
            armed = self.unwaited > 0 or self._always_polled or (self._resumable and self.idle)
            if armed is not self.armed or self.reported:
                self.armed, self.reported = armed, False
                self._local.poller.arm(link, read=armed)

    def expect_fewer(self, count: int) -> None:
        """Note that `count` replies that no thread waited for are no longer due."""
        with self._lock:
            self.unwaited -= count
            if self._always_polled:
                self.arm_poller()

    def leave_to_poller(self) -> None:
        """Have the poller read from now on: unexpected messages may arrive, and must not fill up the link."""
        with self._lock:
            self._always_polled = True
            self.arm_poller()

    def arm_poller(self) -> None:
        """Arm the poller if no thread reads or is about to. Call with the lock held."""
        link = self._channel.link
        if not self.reading and not self.armed and not self._followers and link is not None:
            self.armed = True
            self._local.poller.arm(link, read=True)

    def add_to_poller(self, link: Link) -> None:
        """Register a new link with the poller. Call with the lock held, after the channel took the link."""
        self.armed = self.unwaited > 0 or self._resumable or not self._outgoing or self._always_polled
        self.reported = False
        self._local.poller.add(link, read=self.armed, once=self._outgoing)
        if not self.reading:
            self.elect()

    def release_followers(self) -> list[Reader]:
        """Return all followers and forget them: the channel is closed. Call with the lock held."""
        followers = list(self._followers)
        self._followers.clear()
        return followers
