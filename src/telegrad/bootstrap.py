"""Chooses transports and addresses, creates the agent with its extensions, and joins the group."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from telegrad.agent.agent import Agent
from telegrad.backward.engine import Autograd
from telegrad.calls.registry import Registry
from telegrad.connection.group_keys import GroupKeys, derive_keys
from telegrad.connection.joining import probe
from telegrad.connection.token_source import find_token
from telegrad.connection.worker_record import FoundGroup, WorkerRecord, modes_differ
from telegrad.errors import RendezvousError, TelegradError, TokenError
from telegrad.options import Options
from telegrad.rref.manager import RRefManager
from telegrad.transport.addresses import (
    choose_addresses,
    host_identity,
    remove_dead_sockets,
    socket_path,
)
from telegrad.transport.base import Transport
from telegrad.transport.runtime_directory import explain, is_full, runtime_directory
from telegrad.transport.sockets import SocketPoller
from telegrad.transport.tcp import TcpTransport, format_tcp
from telegrad.transport.unix import UnixTransport
from telegrad.waiting import RealRuntime
from telegrad.wire.devices import DevicePairs, check_pairs_exist

_log = logging.getLogger("telegrad")

_NEEDS_TOKEN = "Run `telegrad token` once and set TELEGRAD_TOKEN to its output on every worker."


ListenIfNeeded = Callable[[Sequence[WorkerRecord]], None]
Probe = Callable[[WorkerRecord], str]
"""Returns whether a worker is "alive", "leaving", "gone", or "silent": it does not answer."""
ExchangeRecords = Callable[[WorkerRecord, GroupKeys | None, ListenIfNeeded, Probe], FoundGroup]
RESTART_VARIABLE = "TELEGRAD_RESTART"
_JOINS = 65536  # more often no process joins groups between two restarts
_PROBE_TIMEOUT = 2.0
_joins = itertools.count()


def start_agent(
    name: str,
    rank: int,
    exchange_records: ExchangeRecords,
    options: Options,
    store_address: tuple[str, int] | None = None,
    prepare: Callable[[Agent], None] | None = None,
    registry: Registry | None = None,
    device_index: int | None = None,
) -> Agent:
    """Create an agent and join a group.

    `exchange_records` receives this worker's record, the group's keys, a function that opens the TCP port if the group
    needs it, and one that tells whether a worker is there. It returns the group. `store_address` is the host and port
    of the rendezvous store, if it has any. `prepare` is called with the agent before it serves calls. `registry` is
    what other workers may call in registered mode. `device_index` is the accelerator that is current on the agent's
    threads; None: the first one.
    """
    token, allowed = check_token(options)
    agent = _make_agent(name, rank, token, allowed, options, store_address, registry)
    agent.executor.threads.device_index = device_index
    try:
        found = exchange_records(agent.me, agent.local.keys, partial(_listen_if_needed, agent), partial(_probe, agent))
        group = [*found.records, agent.me] if found.exists else found.records
        _check_modes(agent.me, group)
        _check_reachable(agent.me, group, token)
        check_device_maps(agent.me, agent.settings.device_maps, group)
        if prepare is not None:
            prepare(agent)
        if found.exists:
            deadline = agent.runtime.now() + options.init_timeout
            vouched = RESTART_VARIABLE in os.environ
            agent.join(found.records, deadline=deadline, vouched=vouched, is_open=found.is_open)
        else:
            agent.start(group, is_open=found.is_open)
    except BaseException:
        agent.close()
        raise
    return agent


def _probe(agent: Agent, target: WorkerRecord) -> str:
    return probe(agent.peers, agent.me, target, agent.runtime.now() + _PROBE_TIMEOUT)


def _first_generation() -> int:
    """Return the generation that the launcher of this worker gives it, or 0."""
    text = os.environ.get(RESTART_VARIABLE, "")
    if not text:
        return 0
    if not text.isdecimal():
        raise RendezvousError(f"{RESTART_VARIABLE} must be how often the worker was started before, not {text!r}")
    return int(text) * _JOINS + next(_joins)


def _listen_if_needed(agent: Agent, group: Sequence[WorkerRecord]) -> None:
    """Open the TCP port, unless all workers reach each other over unix sockets."""
    hosts = {record.host for record in group}
    on_one_host = len(hosts) == 1 and "" not in hosts
    if on_one_host and all(any(one.startswith("unix://") for one in record.addresses) for record in group):
        return
    for listener in agent.listeners:
        listener.open()


def check_token(options: Options) -> tuple[bytes | None, Sequence[str]]:
    """Return the group's token, if there is one, and the transports that may be used."""
    token = find_token(options.token)
    allowed = options.allowed_transports()
    if "unix" not in allowed and token is None:
        raise TokenError(f"tcp connections need a group token, but none is set. {_NEEDS_TOKEN}")
    return token, allowed


def _make_agent(
    name: str,
    rank: int,
    token: bytes | None,
    allowed: Sequence[str],
    options: Options,
    store_address: tuple[str, int] | None,
    registry: Registry | None,
) -> Agent:
    runtime = RealRuntime()
    incarnation = runtime.random_bits(63)
    transports: list[tuple[Transport, str]] = []
    host, directory = "", Path()
    if "unix" in allowed:
        directory = runtime_directory()
        remove_dead_sockets(directory)
        host = host_identity(directory)
        transports.append((UnixTransport(), f"unix://{socket_path(directory, name, incarnation)}"))
    if "tcp" in allowed and token is not None:
        bind, advertise = choose_addresses(
            rendezvous_host=store_address[0] if store_address else None,
            rendezvous_port=store_address[1] if store_address else None,
            bind=options.bind,
            advertise=options.advertise,
            interface=options.interface,
        )
        transports.append((_tcp_transport(name, token, options, advertise), format_tcp(bind, 0)))
    try:
        agent = Agent(
            name,
            rank,
            transports=transports,
            poller=SocketPoller(options.microseconds_of_spin()),
            runtime=runtime,
            token=token,
            host=host,
            main=_main_program(),
            incarnation=incarnation,
            generation=_first_generation(),
            settings=options.settings(),
            registry=registry,
        )
    except OSError as error:
        if not is_full(error):
            raise
        raise TelegradError(f"worker {name!r} cannot create its unix socket: {explain(error, directory)}") from error
    Autograd(agent)
    RRefManager(agent)
    return agent


def _tcp_transport(name: str, token: bytes, options: Options, advertise: str) -> Transport:
    files = options.certificate_files()
    if not options.uses_tls():
        _log.warning(
            "worker %r runs without TLS (tls=False or TELEGRAD_TLS=0): anyone on the network path to another machine "
            "can read and change its traffic, and run code on both workers",
            name,
        )
        return TcpTransport(advertise=advertise, deferred=True)
    # Imported here, because workers without a token use unix sockets only.
    from telegrad.transport.certificates import load_credentials
    from telegrad.transport.tls import TlsTransport

    credentials = load_credentials(*files, worker=name) if files is not None else None
    return TlsTransport(derive_keys(token).preamble, credentials, advertise=advertise, deferred=True)


def _main_program() -> str:
    """Return a hash of the program that runs as ``__main__``; empty for an interactive session, which has no file."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if not path:
        return ""
    try:
        content = Path(path).read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()[:16]


def _check_modes(me: WorkerRecord, group: Sequence[WorkerRecord]) -> None:
    for record in group:
        if record.accept != me.accept:
            raise RendezvousError(modes_differ(me, record.name, record.accept))


def check_device_maps(me: WorkerRecord, maps: Mapping[str, DevicePairs], group: Sequence[WorkerRecord]) -> None:
    """Raise ValueError if a device map names a worker or a device that does not exist."""
    records = {record.name: record for record in group}
    for name, pairs in maps.items():
        if name not in records:
            raise ValueError(
                f"device_maps of worker {me.name!r} names worker {name!r}, which is not in the group: the workers are "
                f"{', '.join(sorted(records))}"
            )
        check_pairs_exist(pairs, me.name, me.devices, name, records[name].devices, "the device map")


def _check_reachable(me: WorkerRecord, group: Sequence[WorkerRecord], token: bytes | None) -> None:
    mine = {address.partition("://")[0] for address in me.addresses}
    for record in group:
        theirs = {address.partition("://")[0] for address in record.addresses}
        if "tcp" in mine & theirs and record.tls != me.tls:
            plain, encrypted = (me, record) if record.tls else (record, me)
            raise RendezvousError(
                f"worker {plain.name!r} has TLS switched off and worker {encrypted.name!r} has not: start all workers "
                "with the same option tls and the same TELEGRAD_TLS"
            )
        if "tcp" in mine & theirs or ("unix" in mine & theirs and record.host == me.host):
            continue
        if token is None:
            raise TokenError(
                f"worker {record.name!r} runs on another host or as another user, so a tcp connection is needed, and "
                f"that needs a group token. {_NEEDS_TOKEN}"
            )
        raise RendezvousError(
            f"worker {me.name!r} (at {', '.join(me.addresses)}) and worker {record.name!r} (at "
            f"{', '.join(record.addresses)}) have no transport in common; check TELEGRAD_TRANSPORTS and TELEGRAD_TOKEN"
        )
