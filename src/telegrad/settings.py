"""What can be set about an agent."""

from __future__ import annotations

from dataclasses import dataclass, field

from telegrad.protocol.limits import SessionSettings
from telegrad.wire.frames import Limits


@dataclass(frozen=True)
class AgentSettings:
    """The defaults suit nearly everybody."""

    rpc_timeout: float = 60.0
    """Seconds after which a call without a timeout of its own fails; 0: never."""
    running: int = 16
    """User functions that may run at one time. Those that wait for nested calls do not count."""
    connect_timeout: float = 10.0
    """Seconds that opening a connection, with its handshake, may take."""
    stop_timeout: float = 5.0
    """Seconds that shutdown waits for functions that are still running, once everything else is done."""
    shared_memory: int = 1 << 30
    """Bytes of memory that this worker may share with others of its host, for large messages; 0: none."""
    session: SessionSettings = field(default_factory=SessionSettings)
    limits: Limits = field(default_factory=Limits)
