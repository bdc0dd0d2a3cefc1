"""Which connection makes room for another while all places are taken."""

from __future__ import annotations

import pytest

from telegrad.connection.eviction import (
    CROWDED_TIMES,
    FLOODED_TIMES,
    MEMBER_TIME,
    SILENT,
    UNREAD,
    WAITING,
    EvictionOrder,
    source_of,
)

LATER = 100.0


class Connection:
    def __init__(self, source: str = "here", stage: int = SILENT, accepted_at: float = 0.0) -> None:
        self.source, self.stage, self.accepted_at = source, stage, accepted_at


def ordered(*connections: Connection) -> EvictionOrder[Connection]:
    order: EvictionOrder[Connection] = EvictionOrder()
    for connection in connections:
        order.add(connection)
    return order


def test_silent_connections_go_first_then_waiting_then_unread_ones_and_the_oldest_of_each() -> None:
    stages = [UNREAD, WAITING, SILENT, UNREAD, WAITING, SILENT]
    connections = [Connection(stage=stage, accepted_at=float(at)) for at, stage in enumerate(stages)]
    order = ordered(*connections)
    gone = []
    while (victim := order.victim(LATER, 6)) is not None:
        gone.append(connections.index(victim))
        order.discard(victim)
    assert gone == [2, 5, 1, 4, 0, 3]


def test_a_fresh_connection_is_not_evicted_before_those_that_had_their_moment() -> None:
    old, fresh = Connection(stage=WAITING), Connection(stage=SILENT, accepted_at=1.0)
    order = ordered(old, fresh)
    assert order.victim(1.0, 2) is old
    order.discard(old)
    assert order.victim(1.0, 1) is None
    assert order.victim(1.001 + FLOODED_TIMES[SILENT], 1) is fresh


def test_the_source_with_the_most_connections_loses_one() -> None:
    lone, many = Connection("lone"), [Connection("many", accepted_at=1.0) for _ in range(2)]
    assert ordered(lone, *many).victim(LATER, 3) is many[0]


@pytest.mark.parametrize("stage", [SILENT, WAITING, UNREAD])
def test_connections_have_more_time_if_no_source_has_most_of_the_places(stage: int) -> None:
    order = ordered(*(Connection(f"source {number}", stage) for number in range(4)))
    assert order.victim(CROWDED_TIMES[stage] - 0.001, 4) is None
    assert order.victim(CROWDED_TIMES[stage], 4) is not None


def test_a_connection_with_a_valid_hello_is_evicted_last_and_late() -> None:
    member, stranger = Connection(), Connection(stage=UNREAD)
    order = ordered(member, stranger)
    order.greeted(member)
    assert order.victim(LATER, 2) is stranger
    assert order.stranger(0.0) is None
    assert order.stranger(LATER) is stranger
    order.discard(stranger)
    assert order.stranger(LATER) is None
    assert order.victim(MEMBER_TIME - 0.1, 1) is None
    assert order.victim(MEMBER_TIME, 1) is member
    assert list(order) == [member]
    order.discard(member)
    assert list(order) == []


def test_ipv6_sources_are_networks() -> None:
    assert source_of("::ffff:10.0.0.9:80") == "10.0.0.9"
    assert source_of("fe80::1%eth0:80") == source_of("fe80::2%eth0:80") == "fe80::/64"
    assert source_of("no address::1") == "no address:"
