"""Options of `init_rpc`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from telegrad.errors import CertificateError
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.peer_limits import PeerLimits, check_limits
from telegrad.settings import AgentSettings
from telegrad.transport.addresses import parse_address
from telegrad.transport.ports import PORTS_VARIABLE, parse_ports
from telegrad.transport.spinning import SPIN
from telegrad.wire.devices import DeviceMap, DevicePairs, parse_device_map
from telegrad.wire.frames import Limits

DEFAULT_RPC_TIMEOUT = 60.0
UNSET_RPC_TIMEOUT = -1.0
DEFAULT_SHUTDOWN_TIMEOUT = 0.0
DEFAULT_NUM_WORKER_THREADS = 16
TRANSPORTS = ("unix", "tcp")
MODES = ("any", "registered")
OBSERVERS = ("group", "local", "off")


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
    ports: str | None = None
    """The TCP ports that this worker may listen on, as in ``"29600-29663"``. It takes one. Default: TELEGRAD_PORTS, or
    else any free port."""
    inbound: bool | None = None
    """Whether other workers can connect to this one. False: it listens on no TCP port, and opens the connections on
    which others call it. Default: TELEGRAD_INBOUND, or else True."""
    tls: bool | None = None
    """Whether tcp connections are encrypted. Default: TELEGRAD_TLS, or else True. Without TLS, anyone on the network
    path can read and change the traffic, and run code on the workers."""
    tls_certificate: str | os.PathLike[str] | None = None
    """The file of this worker's own certificate, whose DNS name is the worker's name, for mutual TLS. Default:
    TELEGRAD_TLS_CERT, or else a certificate made on the spot. Needs `tls_key` and `tls_ca`."""
    tls_key: str | os.PathLike[str] | None = None
    """The file of the certificate's private key. Default: TELEGRAD_TLS_KEY."""
    tls_ca: str | os.PathLike[str] | None = None
    """The file of the CA that signed the certificates of all workers. Default: TELEGRAD_TLS_CA."""
    shared_memory: int | None = None
    """Bytes of memory to share with workers on this host for large messages. 0 means none. Default:
    TELEGRAD_SHARED_MEMORY, or else 1 GiB."""
    spin: int | None = None
    """Microseconds for which a waiting thread spins before it sleeps. 0 means none. Default: TELEGRAD_SPIN, or else
    400."""
    slow_call: int | None = None
    """Seconds after which a call that this worker waits for is logged as slow, and again when it has lasted twice as
    long. 0 means never. Default: TELEGRAD_SLOW_CALL, or else 10."""
    events: int | None = None
    """How many of its latest events this worker keeps for `telegrad.observe`. 0 means none. Default: TELEGRAD_EVENTS,
    or else 8192."""
    observe: str | None = None
    """Who may look at this worker: ``group`` (members, and whoever has the token), ``local`` (only processes of this
    user on this host), or ``off``. Default: TELEGRAD_OBSERVE, or else group, and local in registered mode."""
    metrics: str | None = None
    """Where this worker serves Prometheus metrics: ``PORT`` on loopback, or ``HOST:PORT``. The worker's id is added to
    the port; 0 means any free one. Default: TELEGRAD_METRICS, or else nowhere. Needs ``telegrad[metrics]``."""
    otel: bool | None = None
    """Whether this worker makes OpenTelemetry spans of calls and passes. Default: TELEGRAD_OTEL, or else False. Needs
    ``telegrad[otel]``."""
    accept: str | None = None
    """``any``, or ``registered``: other workers may call only what is exposed, with plain data. One mode per group.
    Default: TELEGRAD_ACCEPT, or else any."""
    device_maps: Mapping[str, DeviceMap] | None = None
    """By worker: the devices there to which tensors on devices of this worker are sent, as in
    ``{"worker1": {"cuda:0": "cuda:1"}}``. Results and gradients come back by the reverse. A device that is not in the
    map keeps its name."""
    direct_devices: bool = False
    """Whether tensors on CUDA devices are passed to other processes of this host by CUDA's memory handles, instead of
    through host memory. It has never run on hardware. The same on every worker."""
    members: Sequence[str] | None = None
    """Addresses of members of a group that exists, to join it through the first that answers, without the store.
    `rpc.workers()` lists them."""
    init_timeout: float = 300.0
    """Seconds to wait for all workers to join."""
    session: SessionSettings = field(default_factory=SessionSettings)
    limits: Limits = field(default_factory=Limits)
    peer_limits: PeerLimits | Mapping[str, PeerLimits] | None = None
    """What each other worker may use of this one: limits for all, or by patterns of worker names such as
    ``{"partner*": PeerLimits(calls=8)}``, of which the first that matches counts."""

    def settings(self, environ: Mapping[str, str] = os.environ) -> AgentSettings:
        """Return the settings of the agent, from the options or the environment."""
        if self.rpc_timeout < 0:
            raise ValueError(f"rpc_timeout must be at least 0 (0: no timeout), not {self.rpc_timeout}")
        if self.num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be at least 1, not {self.num_worker_threads}")
        return AgentSettings(
            rpc_timeout=self.rpc_timeout,
            running=self.num_worker_threads,
            shared_memory=self._shared_memory(environ),
            accept=self.accepted(environ),
            slow_call=_number(
                "slow_call", self.slow_call, int(AgentSettings.slow_call), "seconds, or 0 for never", environ
            ),
            session=self.session,
            limits=self.limits,
            device_maps=self._device_maps(),
            direct_devices=self.direct_devices,
            peer_limits=check_limits(self.peer_limits),
            events=_number("events", self.events, AgentSettings.events, "events, or 0 to keep none", environ),
            observe=self._observe(environ),
        )

    def member_addresses(self) -> list[str]:
        """Return the addresses of members of the group, if there are any. Raises a ValueError if one is invalid."""
        members = () if self.members is None else self.members
        if isinstance(members, str) or not all(isinstance(one, str) for one in members):
            raise TypeError(f"members must be a list of addresses, such as ['tcp://10.0.0.1:4000'], not {members!r}")
        return [str(parse_address(one)) for one in members]

    def _device_maps(self) -> dict[str, DevicePairs]:
        maps = {} if self.device_maps is None else self.device_maps
        if not isinstance(maps, Mapping) or not all(isinstance(one, Mapping) for one in maps.values()):
            raise TypeError(
                "device_maps must have a map for each worker, such as {'worker1': {'cuda:0': 'cuda:1'}}, and is "
                f"{maps!r}"
            )
        return {name: parse_device_map(one, f"the device map for worker {name!r}") for name, one in maps.items()}

    def accepted(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return which calls and values the group accepts, from the option or the environment."""
        accept, source = self.accept, "the option accept"
        if accept is None:
            accept, source = environ.get("TELEGRAD_ACCEPT", "").strip() or "any", "TELEGRAD_ACCEPT"
        if accept not in MODES:
            raise ValueError(f"{source} must be {' or '.join(map(repr, MODES))}, not {accept!r}")
        return accept

    def _observe(self, environ: Mapping[str, str]) -> str:
        observe, source = self.observe, "the option observe"
        if observe is None:
            observe, source = environ.get("TELEGRAD_OBSERVE", "").strip(), "TELEGRAD_OBSERVE"
        if observe not in ("", *OBSERVERS):
            raise ValueError(f"{source} must be {', '.join(map(repr, OBSERVERS))}, not {observe!r}")
        return observe

    def _shared_memory(self, environ: Mapping[str, str]) -> int:
        what = "bytes, or 0 to share none"
        return _number("shared_memory", self.shared_memory, AgentSettings.shared_memory, what, environ)

    def microseconds_of_spin(self, environ: Mapping[str, str] = os.environ) -> int:
        """Return how long to spin before sleeping, from the option or the environment."""
        return _number("spin", self.spin, SPIN, "microseconds, or 0 to sleep at once", environ)

    def metrics_address(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return where to serve metrics, from the option or the environment; empty: nowhere."""
        return environ.get("TELEGRAD_METRICS", "").strip() if self.metrics is None else str(self.metrics)

    def uses_otel(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Return whether to make OpenTelemetry spans, from the option or the environment."""
        if self.otel is not None:
            return self.otel
        text = environ.get("TELEGRAD_OTEL", "").strip()
        if text not in ("", "0", "1"):
            raise ValueError(f"TELEGRAD_OTEL is {text!r}: set it to 1 to make spans, or to 0")
        return text == "1"

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

    def allowed_ports(self, environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
        """Return the TCP ports to listen on, from the option or the environment; empty: any."""
        if self.ports is not None:
            return parse_ports(self.ports, "the option ports")
        text = environ.get(PORTS_VARIABLE, "").strip()
        return parse_ports(text) if text else ()

    def accepts_inbound(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Return whether other workers can connect to this one, from the option or the environment."""
        text = environ.get("TELEGRAD_INBOUND", "").strip()
        if self.inbound is None and text not in ("", "0", "1"):
            raise ValueError(f"TELEGRAD_INBOUND is {text!r}: set it to 0 if nobody can connect to this worker, or to 1")
        inbound = text != "0" if self.inbound is None else self.inbound
        if not inbound and not self.uses_tls(environ):
            raise ValueError(
                "a worker that only connects outwards (inbound=False or TELEGRAD_INBOUND=0) needs TLS, which is "
                "switched off (tls=False or TELEGRAD_TLS=0)"
            )
        return inbound

    def uses_tls(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Return whether tcp connections are encrypted, from the option or the environment."""
        if self.tls is not None:
            return self.tls
        text = environ.get("TELEGRAD_TLS", "").strip()
        if text not in ("", "0", "1"):
            raise ValueError(f"TELEGRAD_TLS is {text!r}: set it to 0 to switch TLS off, or to 1")
        return text != "0"

    def certificate_files(self, environ: Mapping[str, str] = os.environ) -> tuple[Path, Path, Path] | None:
        """Return the user's certificate, key and CA, from the options or the environment; None if there are none."""
        given = {
            "tls_certificate (TELEGRAD_TLS_CERT)": self.tls_certificate or environ.get("TELEGRAD_TLS_CERT"),
            "tls_key (TELEGRAD_TLS_KEY)": self.tls_key or environ.get("TELEGRAD_TLS_KEY"),
            "tls_ca (TELEGRAD_TLS_CA)": self.tls_ca or environ.get("TELEGRAD_TLS_CA"),
        }
        missing = [name for name, path in given.items() if not path]
        if len(missing) == len(given):
            return None
        if missing:
            raise CertificateError(
                f"mutual TLS needs a certificate, its key and a CA, but {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set"
            )
        if not self.uses_tls(environ):
            raise CertificateError(
                "certificates are given, but TLS is switched off (tls=False or TELEGRAD_TLS=0): remove one of the two"
            )
        certificate, key, ca = (Path(path) for path in given.values() if path)
        return certificate, key, ca


def _number(name: str, given: int | None, default: int, what: str, environ: Mapping[str, str]) -> int:
    """Return a numeric option: the given value, or else that of the environment, or else the default."""
    number, source = given, f"the option {name}"
    if number is None:
        variable = f"TELEGRAD_{name.upper()}"
        text = environ.get(variable, "").strip()
        if not text:
            return default
        number, source = int(text) if text.isdecimal() else -1, f"{variable} ({text!r})"
    if number < 0:
        raise ValueError(f"{source} must be a number of {what}")
    return number


_LONGEST_TIMEOUT = 1e9  # seconds, about 32 years; longer ones are no timeouts


def given_timeout(timeout: float) -> float | None:
    """Convert a timeout of the public API for the agent, where None means the default."""
    if timeout == UNSET_RPC_TIMEOUT:
        return None
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not timeout >= 0:  # which is also false for NaN
        raise ValueError(f"timeout must be at least 0 seconds (0: no timeout), or -1 for the default, not {timeout}")
    return timeout if timeout < _LONGEST_TIMEOUT else 0.0
