"""The interface between a channel and its agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from telegrad.connection.worker_record import WorkerRecord
from telegrad.execution.executor import Executor
from telegrad.transport.base import Poller
from telegrad.transport.slabs import SlabPool
from telegrad.waiting import Runtime
from telegrad.wire.frames import Frame, Limits, Message

if TYPE_CHECKING:
    from telegrad.connection.channel import Channel


class ChannelOwner(Protocol):
    """The agent, as a channel uses it."""

    me: WorkerRecord
    runtime: Runtime
    poller: Poller
    executor: Executor
    limits: Limits
    slabs: SlabPool

    def deliver(self, channel: Channel, message: Message) -> None:
        """Process a message that arrived. Must be short."""

    def undelivered(self, channel: Channel, frame: Frame, message: Message | None, cause: Exception) -> bool:
        """Report a message that this worker could not process. Returns False if that is impossible."""

    def channel_lost(self, channel: Channel, reason: str) -> None:
        """Handle the end of the session: the peer is lost."""

    def channel_left(self, channel: Channel, cause: str) -> None:
        """Handle the peer's goodbye. `cause` is the error that ended it, if one did."""

    def reconnect(self, channel: Channel) -> None:
        """Open a new link for the channel, on another thread."""
