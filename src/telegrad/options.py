"""Options of `init_rpc`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.peer_limits import PeerLimits, check_limits
from telegrad.settings import AgentSettings
from telegrad.transport.spinning import SPIN
from telegrad.wire.frames import Limits

DEFAULT_RPC_TIMEOUT = 60.0
UNSET_RPC_TIMEOUT = -1.0
DEFAULT_SHUTDOWN_TIMEOUT = 0.0
DEFAULT_NUM_WORKER_THREADS = 16
TRANSPORTS = ("unix", "tcp")


@dataclass
class Options:
    """Options of `init_rpc`. The first three have torch's names and defaults.

    >>> Options(rpc_timeout=10).num_worker_threads
    16
    """

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT
    """Default timeout of calls in seconds. 0 means none."""
    init_method: str = "env://"
    """The rendezvous URL: ``env://``, ``tcp://host:port`` or ``file:///path``."""
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS
    """How many user functions may run at the same time on this worker, not counting those that wait for calls."""
    transports: tuple[str, ...] | None = None
    """Allowed transports, of unix and tcp. Default: TELEGRAD_TRANSPORTS, or else unix, and tcp if there is a token."""
    token: str | bytes | None = field(default=None, repr=False)  # a repr may end up in logs
    """The group's token. Default: TELEGRAD_TOKEN, or the contents of the file TELEGRAD_TOKEN_FILE."""
    bind: str | None = None
    """The address to listen on. Default: the advertised address."""
    advertise: str | None = None
    """The address that others connect to. Default: this host's address on the route to the rendezvous store."""
    interface: str | None = None
    """The network interface whose address to use, instead of `bind` and `advertise`."""
    shared_memory: int | None = None
    """Bytes of memory to share with workers on this host for large messages. 0 means none. Default:
    TELEGRAD_SHARED_MEMORY, or else 1 GiB."""
    spin: int | None = None
    """Microseconds for which a waiting thread spins before it sleeps. 0 means none. Default: TELEGRAD_SPIN, or else
    400."""
    init_timeout: float = 300.0
    """Seconds to wait for all workers to join."""
    session: SessionSettings = field(default_factory=SessionSettings)
    limits: Limits = field(default_factory=Limits)
    peer_limits: PeerLimits | Mapping[str, PeerLimits] | None = None
    """What each other worker may use of this one: limits for all, or by patterns of worker names such as
    ``{"partner*": PeerLimits(calls=8)}``, of which the first that matches counts."""

    def settings(self) -> AgentSettings:
        """Return the settings of the agent."""
        if self.rpc_timeout < 0:
            raise ValueError(f"rpc_timeout must be at least 0 (0: no timeout), not {self.rpc_timeout}")
        if self.num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be at least 1, not {self.num_worker_threads}")
        return AgentSettings(
            rpc_timeout=self.rpc_timeout,
            running=self.num_worker_threads,
            shared_memory=self._shared_memory(),
            session=self.session,
            limits=self.limits,
            peer_limits=check_limits(self.peer_limits),
        )

    def _shared_memory(self) -> int:
        what = "bytes, or 0 to share none"
        return _number("shared_memory", self.shared_memory, AgentSettings.shared_memory, what)

    def microseconds_of_spin(self) -> int:
        """Return how long to spin before sleeping, from the option or the environment."""
        return _number("spin", self.spin, SPIN, "microseconds, or 0 to sleep at once")

    def allowed_transports(self, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """Return the transports that may be used, from the option or the environment."""
        if self.transports is not None:
            names, source = tuple(self.transports), "the option transports"
        else:
            text = environ.get("TELEGRAD_TRANSPORTS", "")
            names, source = tuple(part.strip() for part in text.split(",") if part.strip()), "TELEGRAD_TRANSPORTS"
            if not names:
                return TRANSPORTS
        unknown = [name for name in names if name not in TRANSPORTS]
        if unknown or not names:
            raise ValueError(f"{source} contains {unknown or 'nothing'}; the transports are {', '.join(TRANSPORTS)}")
        return names


def _number(name: str, given: int | None, default: int, what: str) -> int:
    """Return a numeric option: the given value, or else that of the environment, or else the default."""
    number, source = given, f"the option {name}"
    if number is None:
        variable = f"TELEGRAD_{name.upper()}"
        text = os.environ.get(variable, "").strip()
        if not text:
            return default
        number, source = int(text) if text.isdecimal() else -1, f"{variable} ({text!r})"
    if number < 0:
        raise ValueError(f"{source} must be a number of {what}")
    return number


def given_timeout(timeout: float) -> float | None:
    """Convert a timeout of the public API for the agent, where None means the default."""
    if timeout == UNSET_RPC_TIMEOUT:
        return None
    if timeout < 0:
        raise ValueError(f"timeout must be at least 0 seconds (0: no timeout), or -1 for the default, not {timeout}")
    return timeout
