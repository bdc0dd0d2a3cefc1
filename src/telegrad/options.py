"""Options of `init_rpc`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from telegrad.errors import CertificateError
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.peer_limits import PeerLimits, check_limits
from telegrad.settings import AgentSettings
from telegrad.transport.spinning import SPIN
from telegrad.wire.devices import DeviceMap, DevicePairs, parse_device_map
from telegrad.wire.frames import Limits

DEFAULT_RPC_TIMEOUT = 60.0
UNSET_RPC_TIMEOUT = -1.0
DEFAULT_SHUTDOWN_TIMEOUT = 0.0
DEFAULT_NUM_WORKER_THREADS = 16
TRANSPORTS = ("unix", "tcp")
MODES = ("any", "registered")


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
            accept=self.accepted(),
            session=self.session,
            limits=self.limits,
            device_maps=self._device_maps(),
            direct_devices=self.direct_devices,
            peer_limits=check_limits(self.peer_limits),
        )

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
