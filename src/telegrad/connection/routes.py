"""Which ways lead from one worker to another, best first. Pure functions of their records.

1. A unix socket, between workers of one host.
2. TCP, at the addresses of a family (IPv4 or IPv6) that the caller has an address of.
3. Through other workers (`relay://`), if there is no such address: the callee has only addresses of the other family,
   or none because it can only connect outwards. See `telegrad.connection.relaying`.
4. TCP at other addresses, if there is no relay either: a worker may have a route that its address does not tell about.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache

from telegrad.connection.worker_record import WorkerRecord

BOTH = frozenset("46")
"""The families, as they are written in addresses of the scheme relay."""
_FOUR = frozenset("4")
Kind = tuple[str, bool, frozenset[str]]
"""See `kind_of`."""


@lru_cache(4096)  # for a large group it is asked for every worker, several times
def family(host: str) -> frozenset[str]:
    """Return the family of an IP address. A name may have addresses of both.

    >>> family("10.0.0.1"), family("fe80::1%eth0")
    (frozenset({'4'}), frozenset({'6'}))
    """
    try:
        socket.inet_pton(socket.AF_INET, host)  # ten times as fast as ipaddress
    except (OSError, ValueError):
        pass
    else:
        return _FOUR
    try:
        return frozenset(str(ipaddress.ip_address(host).version))
    except ValueError:
        return BOTH


def families(record: WorkerRecord) -> frozenset[str]:
    """Return the families of the addresses that a worker has, and so can connect to."""
    found: frozenset[str] = frozenset()
    for address in record.addresses:
        scheme, _, rest = address.partition("://")
        if scheme == "relay":
            return frozenset(rest.partition("/")[0])
        if scheme == "tcp":
            found |= family(_host(rest))
    return found or BOTH


def _host(rest: str) -> str:
    """Return the host of a TCP address, which is valid (`check_record`), without its scheme."""
    return rest.rpartition(":")[0].removeprefix("[").removesuffix("]")


def kind_of(record: WorkerRecord) -> Kind:
    """Return all that decides whether others can reach a worker, and be in a group with it, except its host.

    >>> kind_of(WorkerRecord("a", 0, 1, ("tcp://10.0.0.1:80", "relay://46/1f2e3d4c5b6a7988"), tls=True))[2] == {
    ...     "tcp://4", "relay://46"}
    True
    """
    ways = set()
    for address in record.addresses:
        scheme, _, rest = address.partition("://")
        if scheme == "tcp":
            rest = "".join(sorted(family(_host(rest))))
        ways.add(f"{scheme}://{rest.partition('/')[0] if scheme in ('tcp', 'relay') else ''}")
    return record.accept, record.tls, frozenset(ways)


def ways(me: WorkerRecord, target: WorkerRecord) -> list[str]:
    """Return the addresses of `target` in the order in which `me` should try them."""
    direct: list[str] = []
    relayed: list[str] = []
    other: list[str] = []
    own = families(me)
    for text in target.addresses:
        scheme, _, rest = text.partition("://")
        if scheme == "unix":
            if target.host == me.host:
                direct.insert(0, text)
        elif scheme == "relay":
            if any(address.startswith("relay://") for address in me.addresses):
                relayed.append(text)
        elif scheme != "tcp" or family(_host(rest)) & own:
            direct.append(text)
        else:
            other.append(text)
    if any(not text.startswith("unix://") for text in direct):
        relayed = []
    return direct + (relayed or other)


def can_dial(me: WorkerRecord, target: WorkerRecord) -> bool:
    """Return whether `target` listens at an address that `me` can most likely connect to over TCP."""
    own = families(me)
    hosts = [_host(address[6:]) for address in target.addresses if address.startswith("tcp://")]
    return any(family(host) & own for host in hosts)


def relays(one: WorkerRecord, other: WorkerRecord, group: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """Return the workers through which two others can reach each other, in an order on which both agree."""
    ends = (one.name, other.name)
    found = [
        record for record in group if record.name not in ends and can_dial(one, record) and can_dial(other, record)
    ]
    return sorted(found, key=lambda record: record.id)


def standby_relays(me: WorkerRecord, group: Sequence[WorkerRecord], count: int) -> list[WorkerRecord]:
    """Return the workers to which `me` has to stay connected, so that all others can reach it through one of them.

    For each that cannot connect to it these are the first `count` of their common relays. If that one can be connected
    to from here, it may serve itself.
    """
    needed: dict[str, WorkerRecord] = {}
    for record in group:
        found = ways(record, me)
        if record.name == me.name or not found or not found[0].startswith("relay://"):
            continue
        for relay in relays(me, record, group)[:count]:
            needed[relay.name] = relay
        if can_dial(me, record) and not relays(me, record, group):
            needed[record.name] = record
    return sorted(needed.values(), key=lambda record: record.id)
