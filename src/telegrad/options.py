"""What can be set at init_rpc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from telegrad.protocol.limits import SessionSettings
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
    """Seconds after which a call without a timeout of its own fails; 0: never."""
    init_method: str = "env://"
    """Where the workers meet: ``env://``, ``tcp://host:port``, ``file:///path``."""
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS
    """User functions that may run at one time on this worker; those that wait for nested calls do not count."""
    transports: tuple[str, ...] | None = None
    """Which of unix and tcp to use; default: TELEGRAD_TRANSPORTS, else unix, and tcp where it can be needed."""
    token: str | bytes | None = field(default=None, repr=False)  # a repr ends up in logs
    """The group's token; default: TELEGRAD_TOKEN, or the file that TELEGRAD_TOKEN_FILE names."""
    bind: str | None = None
    """The address to listen at; default: the one that is advertised."""
    advertise: str | None = None
    """The address that others connect to; default: the one with which this host reaches the rendezvous."""
    interface: str | None = None
    """The network interface whose address to use, instead of the two above."""
    shared_memory: int | None = None
    """Bytes of memory to share with workers of this host, for large messages, 0 for none; default:
    TELEGRAD_SHARED_MEMORY, else 1 GiB."""
    spin: int | None = None
    """Microseconds for which a thread that waits looks for what it waits for before it sleeps, 0 for none; default:
    TELEGRAD_SPIN, else 400."""
    init_timeout: float = 300.0
    """Seconds to wait for all workers to come."""
    session: SessionSettings = field(default_factory=SessionSettings)
    limits: Limits = field(default_factory=Limits)

    def settings(self) -> AgentSettings:
        """What of this the agent needs."""
        if self.rpc_timeout < 0:
            raise ValueError(f"rpc_timeout must be 0 (none) or more, not {self.rpc_timeout}")
        if self.num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be at least 1, not {self.num_worker_threads}")
        return AgentSettings(
            rpc_timeout=self.rpc_timeout,
            running=self.num_worker_threads,
            shared_memory=self._shared_memory(),
            session=self.session,
            limits=self.limits,
        )

    def _shared_memory(self) -> int:
        what = "bytes, or 0 to share none"
        return _number("shared_memory", self.shared_memory, AgentSettings.shared_memory, what)

    def microseconds_of_spin(self) -> int:
        """How long to look before sleeping, from the option or the environment."""
        return _number("spin", self.spin, SPIN, "microseconds, or 0 to sleep at once")

    def allowed_transports(self, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """The transports that may be used, from the option or the environment."""
        if self.transports is not None:
            names, source = tuple(self.transports), "the option transports"
        else:
            text = environ.get("TELEGRAD_TRANSPORTS", "")
            names, source = tuple(part.strip() for part in text.split(",") if part.strip()), "TELEGRAD_TRANSPORTS"
            if not names:
                return TRANSPORTS
        unknown = [name for name in names if name not in TRANSPORTS]
        if unknown or not names:
            raise ValueError(f"{source} names {unknown or 'nothing'}; the transports are {', '.join(TRANSPORTS)}")
        return names


def _number(name: str, given: int | None, default: int, what: str) -> int:
    """An option that is a number, from what was given, else the environment, else the default."""
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
    """A timeout as users give it, for the agent: None means the default."""
    if timeout == UNSET_RPC_TIMEOUT:
        return None
    if timeout < 0:
        raise ValueError(f"a timeout is 0 (none) or more seconds, or -1 for the default; not {timeout}")
    return timeout
