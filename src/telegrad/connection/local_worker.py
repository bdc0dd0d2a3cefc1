"""This worker's side of everything: who it is, its settings, and the clock, threads, memory and sockets that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from telegrad.connection.group_keys import GroupKeys
from telegrad.connection.peer_account import PeerAccounts
from telegrad.connection.worker_record import WorkerRecord
from telegrad.current_waits import CurrentWaits
from telegrad.errors import WorkerLost
from telegrad.events import EventRing
from telegrad.execution.executor import Executor
from telegrad.protocol.limits import SessionSettings
from telegrad.settings import AgentSettings
from telegrad.transport.base import Poller
from telegrad.transport.buffers import BufferPool
from telegrad.transport.slab_pool import SlabPool
from telegrad.waiting import Runtime
from telegrad.wire.devices import DirectPath, Placement

_NEVER = float("inf")


class LocalWorker:
    """What the parts of an agent share. It knows none of them."""

    def __init__(
        self,
        name: str,
        settings: AgentSettings,
        runtime: Runtime,
        poller: Poller,
        executor: Executor,
        keys: GroupKeys | None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.limits = settings.limits
        self.accounts = PeerAccounts(name, settings, runtime)
        self.runtime = runtime
        self.poller = poller
        self.executor = executor
        self.events = EventRing(settings.events)
        """What this worker has done lately."""
        self.optimizer_steps = 0
        """How often an optimizer has stepped here. Steps of one worker take turns."""
        self.waits = CurrentWaits(runtime.now)
        """What its threads wait for now."""
        self.keys = keys
        """The keys of the group; None without a token."""
        self.device_maps = settings.device_maps
        """By worker: where its own devices are mapped to."""
        self.placement: type[Placement] = Placement
        self.direct: DirectPath | None = None
        """How tensors get from device to device without host memory, if that is switched on."""
        self.buffers = BufferPool()
        self.slabs = SlabPool(settings.shared_memory, self.buffers.trim)
        self.me: WorkerRecord
        """Set once the listeners have their addresses."""
        self.closed = ""
        """Why the agent cannot be used; empty while it can."""
        self.leaving = False
        """Whether the agent is shutting down. It may still serve others, for as long as they want."""
        self.departing = False
        """Whether the agent is about to close: it waits for nobody any more."""
        self.given_up: WorkerLost | None = None
        """Why this process has to end, and be started again: another worker holds it for lost, for ever."""
        self.on_idle: Callable[[], None] | None = None
        """Called when a call has ended, while a shutdown waits for that."""


def session_settings(local: LocalWorker, peer: str) -> SessionSettings:
    """Return the settings of sessions with a worker. The local one is not lost to itself, however long it slept."""
    settings = local.settings.session
    return settings if peer != local.me.name else replace(settings, resume_limit=_NEVER, refuse_limit=_NEVER)
