"""Members are read first, and other sources take turns."""

from __future__ import annotations

from telegrad.connection.serving_order import ServingOrder


class Connection:
    def __init__(self, source: str) -> None:
        self.source = source


def drained(order: ServingOrder[Connection]) -> list[Connection]:
    taken = []
    while order:
        connection = order.take()
        assert connection is not None
        taken.append(connection)
    assert order.take() is None
    return taken


def test_sources_take_turns_and_members_come_first() -> None:
    order: ServingOrder[Connection] = ServingOrder()
    flood = [Connection("flood") for _ in range(3)]
    lone, member = Connection("lone"), Connection("flood")
    for connection in (*flood, lone):
        order.add(connection, is_member=False)
    order.add(member, is_member=True)
    assert drained(order) == [member, flood[0], lone, flood[1], flood[2]]


def test_a_removed_connection_is_not_taken() -> None:
    order: ServingOrder[Connection] = ServingOrder()
    connections = [Connection("one"), Connection("one"), Connection("two"), Connection("two")]
    for number, connection in enumerate(connections):
        order.add(connection, is_member=number == 3)
    order.remove(connections[2])
    order.remove(connections[3])
    order.remove(connections[0])
    assert drained(order) == [connections[1]]
