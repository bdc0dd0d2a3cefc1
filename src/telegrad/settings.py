"""The settings of an agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from telegrad.events import DEFAULT_SIZE
from telegrad.protocol.collective_tree import FAN_OUT
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.peer_limits import GivenLimits
from telegrad.wire.devices import DevicePairs
from telegrad.wire.frames import Limits


@dataclass(frozen=True)
class AgentSettings:
    """The settings of an agent. The defaults suit most programs."""

    rpc_timeout: float = 60.0
    """Seconds after which a call without an explicit timeout fails; 0: never."""
    running: int = 16
    """How many user functions may run at the same time. Functions that wait for nested calls do not count."""
    connect_timeout: float = 10.0
    """Seconds for opening a connection, including the handshake."""
    stop_timeout: float = 5.0
    """Seconds that shutdown waits for functions that still run, after everything else is done."""
    shared_memory: int = 1 << 30
    """Bytes of memory that this worker may share with workers on the same host, for large messages; 0: none."""
    accept: str = "any"
    """``any``: any function, and any value that pickle can carry. ``registered``: exposed functions and plain data."""
    slow_call: float = 10.0
    """Seconds after which a call that somebody waits for is logged; 0: never."""
    session: SessionSettings = field(default_factory=SessionSettings)
    limits: Limits = field(default_factory=Limits)
    device_maps: Mapping[str, DevicePairs] = field(default_factory=dict)
    """By worker: the devices there to which tensors on devices of this worker are sent."""
    awaited_replacement: float = 0.0
    """Seconds for which a graceful shutdown waits for the replacement of a worker that was lost or failed."""
    direct_devices: bool = False
    """Whether tensors on devices go directly to devices of other processes of this host, where there is a way."""
    events: int = DEFAULT_SIZE
    """How many of its latest events the agent keeps for `telegrad.observe`; 0: none."""
    observe: str = ""
    """Who may see inside: ``group`` (members, and whoever has the token), ``local`` (processes of this user on this
    host), or ``off``. Empty: ``local`` in registered mode, else ``group``."""
    fan_out: int = FAN_OUT
    """How many members are below each one in the tree of a collective. The same on all workers."""
    peer_limits: GivenLimits = None
    """What each other worker may use of this one, for all or by patterns of names; None: the default of the mode."""
