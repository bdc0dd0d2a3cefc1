"""What a channel needs of its agent, and what it knows of the threads that read its link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from telegrad.connection.worker_record import WorkerRecord
from telegrad.execution.executor import Executor
from telegrad.transport.base import Poller
from telegrad.transport.slab_pool import SlabPool
from telegrad.waiting import Event, Runtime
from telegrad.wire.frames import Frame, Limits, Message

if TYPE_CHECKING:
    from telegrad.connection.channel import Channel


class Reader(Protocol):
    """What a thread reads a link for: a call, or anything else that it waits for."""

    event: Event | None
    """Set when the thread may have to read, or need not wait any more; while it waits for another that reads."""
    leading: int
    """The thread, while it reads."""

    def done(self) -> bool:
        """Whether it need not wait any more."""


class ChannelOwner(Protocol):
    """What a channel needs of its agent."""

    me: WorkerRecord
    runtime: Runtime
    poller: Poller
    executor: Executor
    limits: Limits
    slabs: SlabPool

    def deliver(self, channel: Channel, message: Message) -> None:
        """Take a message that arrived. Must be short."""

    def undelivered(self, channel: Channel, frame: Frame, message: Message | None, cause: Exception) -> bool:
        """A message came that this worker cannot take; False: nobody can be told."""

    def channel_lost(self, channel: Channel, reason: str) -> None:
        """The session ended: the peer is lost."""

    def channel_left(self, channel: Channel, cause: str) -> None:
        """The peer said goodbye; `cause` says which error ended it, if one did."""

    def reconnect(self, channel: Channel) -> None:
        """Open a new link for it, soon and on another thread."""
