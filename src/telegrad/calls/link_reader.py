"""How a thread waits for what a channel brings: it reads the link itself, or waits for the thread that does.

Only one thread reads a link at a time. The first that waits *leads*: it reads, and hands to the other threads what is
theirs. Those *follow*: they sleep until the leader has read what they wait for, or has stopped and appointed one of
them. So a call needs no handoff between threads on the caller's side.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import get_ident

import msgspec

from telegrad.connection.channel import Channel
from telegrad.events import EventRing
from telegrad.execution.executor import Executor
from telegrad.transport.base import Ready
from telegrad.waiting import Event, Runtime

_log = logging.getLogger("telegrad")
_READ = Ready.READ


class Waiter(msgspec.Struct, eq=False):
    """A thread that waits. Any thread may `set` it, more than once."""

    channel: Channel | None = None
    """The channel that it reads or follows."""
    finished: bool = False
    event: Event | None = None
    """Present while it waits without reading."""
    leading: int = 0
    """The thread, while it reads."""
    thread: int = 0
    """The thread, while it waits."""

    def done(self) -> bool:
        """Return whether it need not wait any longer."""
        return self.finished

    def set(self) -> None:
        """End the wait."""
        # Before the rest is looked at: the thread looks here after it has changed the rest, and before it sleeps.
        self.finished = True
        event = self.event
        if event is not None:
            event.set()
        elif self.leading and self.leading != get_ident() and self.channel is not None:
            link = self.channel.link
            if link is not None:
                link.wake()


class LinkReader:
    """Reads links on the threads that wait for what they bring."""

    def __init__(self, worker: str, runtime: Runtime, executor: Executor, events: EventRing) -> None:
        self._worker = worker
        self._runtime = runtime
        self._executor = executor
        self._events = events

    def wait(self, waiter: Waiter, channel: Channel, deadline: float | None, *, handle: bool = False) -> bool:
        """Wait until `waiter` is set, reading `channel` unless another thread does; False if `deadline` passes first.

        With `handle`, this thread also runs the handlers of one-way messages that it reads, each after it has stopped
        leading, so that what a handler waits for can be read by others.
        """
        if self._events.unrecorded:
            catch_up = self._events.catch_up  # looked up first: see `EventRing`
            catch_up()  # the worker that this thread waits for needs longer
        waiter.channel = channel
        thread = waiter.thread = get_ident()
        inbox: deque[Callable[[], None]] | tuple[()] = ()
        while not waiter.finished:
            try:
                link = channel.readers.lead(waiter, thread)
                if link is None:
                    if not self._follow(waiter, channel, deadline):
                        return waiter.finished
                    continue
                if handle:
                    inbox = channel.receiver.inbox = deque()
                while not waiter.finished and not inbox and channel.link is link:
                    if self._executor.wait_for_link(link, deadline) & _READ:
                        channel.receiver.pump()
                    elif deadline is not None and self._runtime.now() >= deadline:
                        return waiter.finished
            finally:
                if waiter.leading:
                    if handle:
                        channel.receiver.inbox = None
                    channel.readers.stop_leading(waiter)
                if inbox:
                    self._run(inbox)
        return True

    def _follow(self, waiter: Waiter, channel: Channel, deadline: float | None) -> bool:
        """Wait while another thread reads; False if the deadline passed."""
        event = waiter.event
        appointed = False
        try:
            # Checked again: it may have been set before there was an event.
            in_time = waiter.finished or event is None or self._executor.wait(event, deadline)
            appointed = in_time and not waiter.finished
        finally:
            if not appointed:
                # It may have been appointed nevertheless. Then another must be, or nobody would read.
                channel.readers.stop_following(waiter)
        return in_time

    def _run(self, inbox: deque[Callable[[], None]]) -> None:
        try:
            while inbox:
                try:
                    inbox.popleft()()
                except Exception:  # noqa: BLE001 - handlers report their own errors; this one is a bug
                    _log.exception("worker %s: a message handler failed", self._worker)
        finally:
            for task in inbox:  # this thread was interrupted, and others may wait for these messages
                self._executor.submit(task)
