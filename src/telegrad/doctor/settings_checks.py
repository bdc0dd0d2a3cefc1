"""Checks of the settings of this process: token, ports, launcher, rendezvous."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping
from difflib import get_close_matches

from telegrad.connection.token_source import Token, find_token
from telegrad.doctor.finding import Finding, Level, ok
from telegrad.environment.advice import token_advice
from telegrad.environment.detection import Detected, detect
from telegrad.errors import RendezvousError, TelegradError, TokenError
from telegrad.transport.ports import PORTS_VARIABLE, describe_ports, parse_ports

PREFIX = "TELEGRAD_"
_NAMES = [
    "ACCEPT",
    "AWAITED_REPLACEMENT",
    "DASHBOARD_TOKEN",
    "DEVICES",
    "EVENTS",
    "FULL_TRACEBACKS",
    "INBOUND",
    "INIT",
    "INIT_METHOD",
    "INTERFACE",
    "LAUNCHER",
    "LAUNCHER_KEY",
    "METRICS",
    "NAME",
    "OBSERVE",
    "OTEL",
    "PORTS",
    "RESTART",
    "RESULT_FD",
    "RUNTIME_DIR",
    "SHARED_MEMORY",
    "SLOW_CALL",
    "SPIN",
    "TERMINAL",
    "TLS",
    "TLS_CA",
    "TLS_CERT",
    "TLS_KEY",
    "TOKEN",
    "TOKEN_FD",
    "TOKEN_FILE",
    "TRANSPORTS",
    "WORK_FD",
]
VARIABLES = frozenset(f"{PREFIX}{name}" for name in _NAMES)
"""Every variable of telegrad's own. The others in docs/settings.md belong to torch or to launchers."""
_CLOSE = 0.75
"""How similar a name must be to one of these to be one with a mistake, from 0 to 1."""


def check_token(environ: Mapping[str, str], *, several_hosts: bool) -> tuple[Finding, Token | None]:
    """Check the group's token, which a group on several machines needs."""
    try:
        token = find_token(None, environ)
    except TokenError as error:
        text, separator, remedy = str(error).rpartition("; ")
        if not separator:
            text, remedy = remedy, token_advice(environ)
        return Finding("token", "problem", text, remedy), None
    if token is not None:
        return ok("token", "there is one, and it is strong enough"), token
    if several_hosts:
        return (
            Finding("token", "problem", "there is none, and the group spans several machines", token_advice(environ)),
            None,
        )
    return ok("token", "none, which is enough for workers of one user on one machine"), None


def check_ports(environ: Mapping[str, str], workers_here: int) -> Finding:
    """Check the range of ports, if there is one: whether enough of them are free."""
    text = environ.get(PORTS_VARIABLE, "").strip()
    if not text:
        return ok("ports", "any free port")
    try:
        ports = parse_ports(text)
    except ValueError as error:
        return Finding("ports", "problem", str(error), f"set {PORTS_VARIABLE} as in 29600-29663, or unset it")
    free = [port for port in ports if _is_free(port)]
    if len(free) < workers_here:
        return Finding(
            "ports",
            "problem",
            f"{PORTS_VARIABLE} allows {describe_ports(ports)}, of which {len(free)} are free, and {workers_here} "
            f"worker{'s' if workers_here > 1 else ''} of this machine need one each",
            "allow more ports, also in the firewall, or end the programs that use them (`ss -tlnp` lists them)",
        )
    return ok("ports", f"{len(free)} of {describe_ports(ports)} are free")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def check_launcher(environ: Mapping[str, str]) -> tuple[Finding, Detected | None]:
    """Say what the launcher of this process says about it."""
    for name in ("RANK", "WORLD_SIZE"):
        text = environ.get(name, "").strip()
        if text and not text.isdecimal():
            return Finding("launcher", "problem", f"{name} is {text!r}", "set it to a number, or unset it"), None
    try:
        detected = detect(environ)
    except RendezvousError as error:
        text, _, remedy = str(error).partition(". ")
        return Finding("launcher", "problem", text, remedy or "set the variables for each worker, or unset them"), None
    if detected is None:
        return ok("launcher", "none has started this process"), None
    if detected.ambiguity():
        text, _, remedy = detected.ambiguity().partition(". ")
        return Finding("launcher", "warning", text, remedy), detected
    place = detected.place
    if place.rank is not None and place.size is not None and not 0 <= place.rank < place.size:
        remedy = f"give each worker a rank from 0 to {place.size - 1}, or correct the number of workers"
        return Finding("launcher", "problem", f"{place.describe()}, and ranks count from 0", remedy), detected
    return ok("launcher", place.describe()), detected


def check_rendezvous(environ: Mapping[str, str], *, several_hosts: bool, rank: int | None = None) -> list[Finding]:
    """Check the address of rank 0, if the environment names one. `rank` is that of this process, if it hosts a store.

    Whether another machine can be reached is not checked here: see `rank_0_elsewhere`.
    """
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host:
        return []
    if not _is_port(port):
        return [
            _rendezvous("problem", f"MASTER_PORT is {port!r}", "set it to a free port of rank 0's machine, as in 29500")
        ]
    try:
        found = _addresses(host)
    except (socket.gaierror, UnicodeError) as error:
        return [
            _rendezvous(
                "problem",
                f"MASTER_ADDR is {host!r}, which has no address ({error})",
                "use a name that every machine knows, or the IP address of rank 0's machine",
            )
        ]
    here = any(map(_is_of_this_machine, found))
    if several_hosts and all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found):
        return [
            _rendezvous(
                "problem",
                f"MASTER_ADDR is {host!r}, which is {' and '.join(found)}: every machine would connect to itself",
                "set it to the address of rank 0's machine in the network of the group; /etc/hosts often has the own "
                "name at 127.0.1.1",
            )
        ]
    if rank == 0 and not here:
        return [
            _rendezvous(
                "warning",
                f"this process has rank 0, and MASTER_ADDR is {host!r} ({', '.join(found)}), which is no address of "
                "this machine",
                "set it to an address of this machine, unless another one forwards the port to it",
            )
        ]
    if rank == 0 and not _is_free(int(port)):
        return [
            _rendezvous(
                "warning",
                f"this process has rank 0, and MASTER_PORT is {port}, which is in use on this machine",
                "choose another port, unless it is this group that uses it (`ss -tlnp` shows the program)",
            )
        ]
    return [ok("rendezvous", f"rank 0 at {host} port {port} ({', '.join(found)})")]


def _rendezvous(level: Level, text: str, remedy: str) -> Finding:
    return Finding("rendezvous", level, text, remedy)


def rank_0_elsewhere(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of rank 0, if the environment names them and they are not of this machine."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not _is_port(port):
        return None
    try:
        elsewhere = not any(map(_is_of_this_machine, _addresses(host)))
    except (socket.gaierror, UnicodeError):  # the check of the rendezvous says so
        return None
    return (host, int(port)) if elsewhere else None


def _is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) <= 0xFFFF


def _addresses(host: str) -> list[str]:
    return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})


def _is_of_this_machine(address: str) -> bool:
    """Return whether this machine has an address: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def check_options(environ: Mapping[str, str]) -> list[Finding]:
    """Check the variables that stand for options of `init_rpc`, as that does. Nothing is found out without torch."""
    try:
        from telegrad.observe.metrics_server import parse_metrics_address
        from telegrad.options import Options
    except ImportError:  # the check of torch says so
        return []
    options = Options()
    checks: list[Callable[[], object]] = [
        lambda: options.settings(environ),
        lambda: options.microseconds_of_spin(environ),
        lambda: options.allowed_transports(environ),
        lambda: options.uses_tls(environ),
        lambda: options.accepts_inbound(environ),
        lambda: options.certificate_files(environ),
        lambda: options.uses_otel(environ),
        lambda: options.metrics_address(environ) and parse_metrics_address(options.metrics_address(environ)),
    ]
    texts: dict[str, None] = {}  # in order, each once
    for check in checks:
        try:
            check()
        except (ValueError, TelegradError) as error:
            texts[str(error)] = None
    remedy = "correct or unset the variable; docs/settings.md lists what each takes"
    findings = [Finding("settings", "problem", text, remedy) for text in texts]
    for name in sorted(environ.keys() - VARIABLES):
        # Kubernetes makes variables of the names of services, so only a name that is almost right is a mistake.
        if name.startswith(PREFIX) and (close := get_close_matches(name.removeprefix(PREFIX), _NAMES, 1, _CLOSE)):
            text, remedy = f"telegrad has no variable {name}", f"correct it to {PREFIX}{close[0]}, or unset it"
            findings.append(Finding("settings", "warning", text, remedy))
    return findings or [ok("settings", "those in the environment are valid")]


def check_proxies(environ: Mapping[str, str]) -> list[Finding]:
    """Say that connections do not use a proxy, if there is one."""
    named = [name for name in environ if name.lower() in ("all_proxy", "http_proxy", "https_proxy") and environ[name]]
    if not named:
        return []
    return [ok("proxy", f"{', '.join(sorted(named))} set; workers connect to each other directly, without a proxy")]
