"""Which way leads to a worker, and which workers relay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from telegrad.connection.routes import can_dial, families, relays, standby_relays, ways
from telegrad.connection.worker_record import WorkerRecord

IPV4, IPV6 = "tcp://10.0.0.{}:29600", "tcp://[fd00::{}]:29600"


def worker(number: int, *addresses: str, relay: str = "", host: str = "") -> WorkerRecord:
    """Return a record. `relay` has the families that the worker can connect to."""
    listed = tuple(address.format(number) for address in addresses)
    if relay:
        listed += (f"relay://{relay}/{number:016x}",)
    return WorkerRecord(f"w{number}", number, number, listed, host=host)


def test_workers_of_one_host_prefer_their_unix_sockets() -> None:
    one = worker(1, "unix:///run/1", IPV4, host="h", relay="4")
    other = worker(2, IPV4, "unix:///run/2", host="h", relay="4")
    assert ways(one, other) == ["unix:///run/2", "tcp://10.0.0.2:29600"]
    elsewhere = worker(3, "unix:///run/3", IPV4, host="i", relay="4")
    assert ways(one, elsewhere) == ["tcp://10.0.0.3:29600"]


def test_an_address_of_a_family_that_the_caller_has_comes_first() -> None:
    both = worker(2, IPV4, IPV6)
    assert ways(worker(1, IPV6), both) == ["tcp://[fd00::2]:29600", "tcp://10.0.0.2:29600"]
    assert ways(worker(1, IPV4), both) == ["tcp://10.0.0.2:29600", "tcp://[fd00::2]:29600"]


def test_a_name_may_have_addresses_of_both_families() -> None:
    assert ways(worker(1, IPV6), worker(2, "tcp://node2:1")) == ["tcp://node2:1"]
    assert families(worker(1, "tcp://node1:1")) == {"4", "6"}


def test_workers_without_a_common_family_use_a_relay_or_try_the_address_if_they_cannot() -> None:
    one, other = worker(1, IPV4, relay="4"), worker(2, IPV6, relay="6")
    assert ways(one, other) == ["relay://6/0000000000000002"]
    assert ways(worker(1, IPV4), other) == ["tcp://[fd00::2]:29600"]  # it has no TLS, and so cannot relay


def test_a_worker_that_only_connects_outwards_is_reached_through_relays() -> None:
    assert ways(worker(1, IPV4, relay="4"), worker(2, relay="4")) == ["relay://4/0000000000000002"]
    assert ways(worker(2, relay="4"), worker(1, IPV4, relay="4")) == ["tcp://10.0.0.1:29600"]


def test_a_relay_is_a_worker_that_both_can_connect_to_and_the_lowest_id_comes_first() -> None:
    ipv4, ipv6, inside = worker(1, IPV4, relay="4"), worker(2, IPV6, relay="6"), worker(3, relay="4")
    group = [worker(9, IPV4, IPV6, relay="46"), worker(5, IPV4, IPV6, relay="46"), worker(4, IPV6, relay="6")]
    group += [ipv4, ipv6, inside]
    assert [record.id for record in relays(ipv4, ipv6, group)] == [5, 9]
    assert relays(ipv4, ipv6, group) == relays(ipv6, ipv4, group)
    assert [record.id for record in relays(inside, ipv6, group)] == [5, 9]


def test_workers_stay_connected_to_relays_only_if_somebody_needs_that() -> None:
    public = [worker(number, IPV4, relay="4") for number in range(4)]
    inside = worker(7, relay="4")
    assert standby_relays(public[0], [*public, inside], 2) == []
    assert [record.id for record in standby_relays(inside, [*public, inside], 2)] == [0, 1, 2]


def test_the_only_other_worker_needs_a_connection_of_the_one_that_it_cannot_reach() -> None:
    public, inside = worker(1, IPV4, relay="4"), worker(2, relay="4")
    assert standby_relays(inside, [public, inside], 2) == [public]


RECORDS = st.lists(
    st.tuples(st.sampled_from([(IPV4,), (IPV6,), (IPV4, IPV6), ()]), st.sampled_from(["4", "6", "46"])), max_size=7
).map(
    lambda drawn: [
        worker(number, *addresses, relay=_digits(addresses, relay)) for number, (addresses, relay) in enumerate(drawn)
    ]
)


def _digits(addresses: tuple[str, ...], relay: str) -> str:
    """Return the families of a worker: those of its addresses, if it listens."""
    return {(IPV4,): "4", (IPV6,): "6", (IPV4, IPV6): "46"}.get(addresses, relay)


@given(RECORDS, st.integers(1, 3))
def test_a_worker_is_connected_to_a_relay_that_its_callers_try(group: list[WorkerRecord], count: int) -> None:
    for target in group:
        standby = {record.name for record in standby_relays(target, group, count)}
        for caller in group:
            route = ways(caller, target)[0]
            if caller is target or not route.startswith("relay://"):
                continue
            assert not can_dial(caller, target)
            tried = [record.name for record in relays(caller, target, group)]
            assert not tried or tried[0] in standby
            if not tried and can_dial(target, caller):
                assert caller.name in standby
