"""Chooses transports and addresses, creates the agent with its extensions, and joins the group."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from telegrad.agent.agent import Agent
from telegrad.backward.engine import Autograd
from telegrad.calls.registry import Registry
from telegrad.connection.group_keys import GroupKeys, derive_keys
from telegrad.connection.joining import GroupEnded
from telegrad.connection.packed_group import find_in, representatives
from telegrad.connection.questions import Questions
from telegrad.connection.relaying import needs_relay
from telegrad.connection.routes import can_dial, family, relays
from telegrad.connection.token_source import find_token
from telegrad.connection.worker_record import AWAIT_VARIABLE, FoundGroup, WorkerRecord, modes_differ
from telegrad.environment.advice import token_advice
from telegrad.environment.detection import restart_count
from telegrad.errors import RendezvousError, TelegradError, TokenError
from telegrad.observe.profiling.agent import Profiling
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

_NETWORK = {"tcp", "relay"}

ListenIfNeeded = Callable[[Sequence[WorkerRecord]], None]
Probe = Callable[[WorkerRecord], str]
"""Returns whether a worker is "alive", "leaving", "gone", or "silent": it does not answer."""
ExchangeRecords = Callable[[WorkerRecord, GroupKeys | None, ListenIfNeeded, Questions], FoundGroup]
_JOINS = 65536  # more often no process joins groups between two restarts
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

    `exchange_records` receives this worker's record, the group's keys, a function that checks whether this worker can
    be in a group with others and opens the TCP port if they need it, and one that tells whether a worker is there. It
    returns the group. `store_address` is the host and port
    of the rendezvous store, if it has any. `prepare` is called with the agent before it serves calls. `registry` is
    what other workers may call in registered mode. `device_index` is the accelerator that is current on the agent's
    threads; None: the first one.
    """
    while True:
        try:
            return _start(name, rank, exchange_records, options, store_address, prepare, registry, device_index)
        except GroupEnded as error:
            _log.info("worker %r looks for its group again: %s", name, error)


def _start(
    name: str,
    rank: int,
    exchange_records: ExchangeRecords,
    options: Options,
    store_address: tuple[str, int] | None,
    prepare: Callable[[Agent], None] | None,
    registry: Registry | None,
    device_index: int | None,
) -> Agent:
    """See `start_agent`. Raises GroupEnded if the group that was found has ended before this worker could join it."""
    token, allowed = check_token(options)
    agent = _make_agent(name, rank, token, allowed, options, store_address, registry)
    agent.executor.threads.device_index = device_index
    try:
        checked: list[Sequence[WorkerRecord]] = [()]

        def check(group: Sequence[WorkerRecord]) -> None:
            _check_and_listen(agent, token, group)
            checked[0] = group

        found = exchange_records(agent.me, agent.local.keys, check, Questions(agent.local, agent.peers))
        group = [*found.records, agent.me] if found.exists else found.records
        if group != checked[0]:
            _check_group(agent, token, group)
        if prepare is not None:
            prepare(agent)
        if found.exists:
            deadline = agent.runtime.now() + options.init_timeout
            vouched = _is_vouched_for(agent.me, found.records)
            generation = -1 if vouched else found.generation
            agent.join(found.records, deadline=deadline, vouched=vouched, is_open=found.is_open, generation=generation)
        else:
            agent.start(group, is_open=found.is_open)
    except BaseException:
        agent.close()
        raise
    return agent


def _first_generation() -> int:
    """Return the generation that the launcher of this worker gives it, or 0."""
    restart = restart_count(os.environ)
    return 0 if restart is None else restart * _JOINS + next(_joins)


def _is_vouched_for(me: WorkerRecord, members: Sequence[WorkerRecord]) -> bool:
    """Return whether a launcher has given this worker its generation.

    It has not if the one before it comes from another launcher, or was started by hand, and has a higher one.
    """
    known = max((record.generation for record in members if record.name == me.name), default=-1)
    return restart_count(os.environ) is not None and me.generation > known


def _awaited_replacement() -> float:
    """Return for how long a shutdown waits for workers that the launcher starts again."""
    text = os.environ.get(AWAIT_VARIABLE, "").strip()
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise RendezvousError(f"{AWAIT_VARIABLE} must be a number of seconds, not {text!r}")
    return seconds


def _check_and_listen(agent: Agent, token: bytes | None, group: Sequence[WorkerRecord]) -> None:
    """Check these workers, and open the TCP port if they need it.

    This is called before a new group is complete. So an error is told to all who wait, and none of them goes on.
    """
    if group:
        _check_group(agent, token, group)
    _listen_if_needed(agent, group)


def _check_group(agent: Agent, token: bytes | None, group: Sequence[WorkerRecord]) -> None:
    """Raise an error if this worker cannot be in a group with these workers."""
    samples = representatives(group)
    _check_modes(agent.me, samples)
    _check_reachable(agent.me, samples, token)
    check_device_maps(agent.me, agent.settings.device_maps, group)


def _listen_if_needed(agent: Agent, group: Sequence[WorkerRecord]) -> None:
    """Open the TCP port, unless all workers reach each other over unix sockets. No workers: any may join later.

    Each also has to reach itself: it calls itself, at least to shut down.
    """
    dialer = agent.peers.connector.dialer
    samples = representatives(group)
    if group and all(dialer.is_local(record) for each in (samples, group) for record in each):
        return  # the samples first: in a large group, those of another host are among them
    for listener in agent.listeners:
        listener.open()


def check_token(options: Options) -> tuple[bytes | None, Sequence[str]]:
    """Return the group's token, if there is one, and the transports that may be used."""
    token = find_token(options.token)
    allowed = options.allowed_transports()
    if "unix" not in allowed and token is None:
        raise TokenError(f"tcp connections need a group token, but none is set. {token_advice(os.environ)}")
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
        pairs = choose_addresses(
            rendezvous_host=store_address[0] if store_address else None,
            rendezvous_port=store_address[1] if store_address else None,
            bind=options.bind,
            advertise=options.advertise,
            interface=options.interface,
        )
        tcp = _tcp_transport(name, token, options, dict(pairs))
        if options.accepts_inbound():
            transports.extend((tcp, format_tcp(listened, 0)) for listened, _ in pairs)
        else:
            transports.append((tcp, ""))
        if options.uses_tls():
            from telegrad.transport.relay import RelayTransport, relay_address
            from telegrad.transport.tls import TlsTransport

            assert isinstance(tcp, TlsTransport)
            own = "".join(sorted(frozenset[str]().union(*(family(advertised) for _, advertised in pairs))))
            transports.append((RelayTransport(tcp), relay_address(own, incarnation)))
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
            settings=replace(options.settings(), awaited_replacement=_awaited_replacement()),
            registry=registry,
        )
    except OSError as error:
        if not is_full(error):
            raise
        raise TelegradError(f"worker {name!r} cannot create its unix socket: {explain(error, directory)}") from error
    Autograd(agent)
    RRefManager(agent)
    Profiling(agent)
    return agent


def _tcp_transport(name: str, token: bytes, options: Options, advertise: Mapping[str, str]) -> Transport:
    files, ports = options.certificate_files(), options.allowed_ports()
    if not options.uses_tls():
        _log.warning(
            "worker %r runs without TLS (tls=False or TELEGRAD_TLS=0): anyone on the network path to another machine "
            "can read and change its traffic, and run code on both workers",
            name,
        )
        return TcpTransport(advertise=advertise, deferred=True, ports=ports)
    # Imported here, because workers without a token use unix sockets only.
    from telegrad.transport.certificates import load_credentials
    from telegrad.transport.tls import TlsTransport

    credentials = load_credentials(*files, worker=name) if files is not None else None
    preamble_key = derive_keys(token).preamble
    return TlsTransport(preamble_key, credentials, advertise=advertise, deferred=True, ports=ports)


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
    for name, pairs in maps.items():
        record = find_in(group, name)
        if record is None:
            raise ValueError(
                f"device_maps of worker {me.name!r} names worker {name!r}, which is not in the group: the workers are "
                f"{', '.join(sorted(each.name for each in group))}"
            )
        check_pairs_exist(pairs, me.name, me.devices, name, record.devices, "the device map")


def _check_reachable(me: WorkerRecord, group: Sequence[WorkerRecord], token: bytes | None) -> None:
    mine = {address.partition("://")[0] for address in me.addresses}
    for record in group:
        theirs = {address.partition("://")[0] for address in record.addresses}
        if mine & _NETWORK and theirs & _NETWORK and record.tls != me.tls:
            plain, encrypted = (me, record) if record.tls else (record, me)
            raise RendezvousError(
                f"worker {plain.name!r} has TLS switched off and worker {encrypted.name!r} has not: start all workers "
                "with the same option tls and the same TELEGRAD_TLS"
            )
        if needs_relay(me, record) and record.name != me.name:
            if can_dial(record, me) or relays(me, record, group):
                continue
            raise RendezvousError(
                f"worker {me.name!r} (at {', '.join(me.addresses)}) and worker {record.name!r} (at "
                f"{', '.join(record.addresses)}) cannot connect to each other, and there is no third worker to which "
                "both can: one of the group needs an address that both can reach (IPv4 and IPv6, and inbound "
                "connections)"
            )
        if (
            record.name == me.name
            or ("tcp" in theirs and mine & _NETWORK)
            or ("unix" in mine & theirs and record.host == me.host)
        ):
            continue
        if token is None:
            raise TokenError(
                f"worker {record.name!r} runs on another host or as another user, so a tcp connection is needed, and "
                f"that needs a group token. {token_advice(os.environ)}"
            )
        raise RendezvousError(
            f"worker {me.name!r} (at {', '.join(me.addresses)}) and worker {record.name!r} (at "
            f"{', '.join(record.addresses)}) have no transport in common; check TELEGRAD_TRANSPORTS and TELEGRAD_TOKEN"
        )
