"""Which halves of relayed connections are joined."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from telegrad.protocol.relay import RelayTable

LIMIT, PATIENCE = 4, 8.0
TICKETS = st.integers(0, 5).map(lambda number: bytes([number]) * 16)
TARGETS = st.integers(1, 3)


class RelayMachine(RuleBasedStateMachine):
    """Compares the table with what its rules say."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RelayTable(LIMIT, PATIENCE)
        self.now = 0.0
        self.waiting: dict[bytes, tuple[int, float]] = {}
        self.joined = 0

    @rule(ticket=TICKETS, worker=TARGETS)
    def caller_comes(self, ticket: bytes, worker: int) -> None:
        is_free = ticket not in self.waiting and len(self.waiting) + self.joined < LIMIT
        assert self.table.caller_came(ticket, worker, self.now) == is_free
        if is_free:
            self.waiting[ticket] = worker, self.now

    @rule(ticket=TICKETS, worker=TARGETS)
    def target_comes(self, ticket: bytes, worker: int) -> None:
        wanted, _ = self.waiting.get(ticket, (None, 0.0))
        assert self.table.target_came(ticket, worker) == (wanted == worker)
        if wanted == worker:
            del self.waiting[ticket]
            self.joined += 1

    @precondition(lambda self: self.joined > 0)
    @rule()
    def pair_ends(self) -> None:
        self.table.pair_ended()
        self.joined -= 1

    @rule(ticket=TICKETS)
    def caller_leaves(self, ticket: bytes) -> None:
        self.table.forget(ticket)
        self.waiting.pop(ticket, None)

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        over = {ticket for ticket, (_, since) in self.waiting.items() if since + PATIENCE <= self.now}
        assert set(self.table.expire(self.now)) == over
        for ticket in over:
            del self.waiting[ticket]

    @invariant()
    def is_bounded(self) -> None:
        assert self.table.joined == self.joined
        assert len(self.waiting) + self.joined <= LIMIT


TestRelayTable = RelayMachine.TestCase
