"""The two rules of Dijkstra and Scholten, one at a time, and together with any order of delivery."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.protocol.termination import Termination

# One rule at a time


def test_the_message_that_engages_is_acknowledged_last() -> None:
    worker: Termination[str] = Termination()
    assert worker.received("engages") == []
    worker.busy()
    worker.sent()
    assert worker.idle() == []
    assert worker.acknowledged() == ["engages"]
    assert not worker.engaged


def test_the_message_that_engages_is_not_acknowledged_while_something_runs() -> None:
    worker: Termination[str] = Termination()
    worker.received("engages")
    worker.busy()
    worker.sent()
    assert worker.acknowledged() == []
    assert worker.idle() == ["engages"]


def test_every_other_message_is_acknowledged_at_once() -> None:
    worker: Termination[str] = Termination()
    worker.received("engages")
    worker.busy()
    assert worker.received("second") == ["second"]
    assert worker.received("third") == ["third"]
    assert worker.idle() == ["engages"]


def test_a_worker_with_nothing_to_do_acknowledges_when_it_settles() -> None:
    worker: Termination[str] = Termination()
    assert worker.received("engages") == []
    assert worker.settle() == ["engages"]
    assert worker.settle() == []


def test_a_worker_can_be_engaged_again() -> None:
    worker: Termination[str] = Termination()
    worker.received("first")
    assert worker.settle() == ["first"]
    assert worker.received("second") == []
    assert worker.engaged
    assert worker.settle() == ["second"]


def test_the_starter_is_quiet_when_it_is_idle_and_all_its_messages_are_acknowledged() -> None:
    start: Termination[str] = Termination()
    start.start()
    start.sent()
    assert start.unacknowledged == 1
    assert start.idle() == []
    assert not start.quiet
    assert start.acknowledged() == []
    assert start.quiet


def test_the_starter_acknowledges_every_message_at_once() -> None:
    start: Termination[str] = Termination()
    start.start()
    assert start.received("from another worker") == ["from another worker"]
    start.idle()
    assert start.received("later") == ["later"]


def test_only_the_starter_can_be_quiet() -> None:
    worker: Termination[str] = Termination()
    assert not worker.quiet
    worker.received("engages")
    worker.settle()
    assert not worker.quiet


def test_giving_up_acknowledges_the_engaging_message_once() -> None:
    worker: Termination[str] = Termination()
    worker.received("engages")
    worker.busy()
    worker.sent()
    assert worker.give_up() == ["engages"]
    assert worker.give_up() == []
    assert worker.idle() == []
    assert worker.acknowledged() == []


def test_a_worker_that_gave_up_acknowledges_late_messages_at_once_while_it_runs() -> None:
    worker: Termination[str] = Termination()
    worker.received("engages")
    worker.busy()
    worker.sent()  # to a lost worker: never acknowledged
    worker.give_up()
    assert worker.received("late") == ["late"]
    assert worker.settle() == []
    assert worker.idle() == []
    assert not worker.engaged


def test_a_starter_that_gave_up_acknowledges_late_messages_at_once() -> None:
    start: Termination[str] = Termination()
    start.start()
    start.sent()
    assert start.give_up() == []
    assert start.received("late") == ["late"]
    assert not start.engaged


# Together


@dataclass
class Computation:
    """Workers that send to each other at random: each message and task may cause more, until the budget is spent.

    Worker 0 starts. Messages, acknowledgements and tasks are carried out in an order that a seed decides.
    """

    count: int
    budget: int
    seed: int
    requests: list[tuple[int, int]] = field(default_factory=list)  # ticket, receiver
    acks: list[int] = field(default_factory=list)  # tickets
    running: list[int] = field(default_factory=list)
    sender: dict[int, int] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.workers: list[Termination[int]] = [Termination() for _ in range(self.count)]

    def run(self) -> None:
        self.workers[0].start()
        self.running.append(0)
        while self.requests or self.acks or self.running:
            assert not self.workers[0].quiet, "quiet, with something in progress"
            steps = [
                (self._deliver, self.requests),
                (self._deliver_ack, self.acks),
                (self._end_task, self.running),
            ]
            self.random.choice([step for step, box in steps if box])()
        assert self.workers[0].quiet, "never quiet"
        assert self.acknowledged == set(self.sender), "a message was not acknowledged"
        assert not any(worker.engaged for worker in self.workers[1:])

    def _send_some(self, worker: int) -> None:
        for _ in range(self.random.randint(0, 2)):
            if self.budget:
                self.budget -= 1
                ticket = len(self.sender)
                self.sender[ticket] = worker
                self.workers[worker].sent()
                self.requests.append((ticket, self.random.randrange(self.count)))

    def _acknowledge(self, tickets: list[int]) -> None:
        for ticket in tickets:
            assert ticket not in self.acknowledged, "acknowledged twice"
            self.acknowledged.add(ticket)
            self.acks.append(ticket)

    def _deliver(self) -> None:
        ticket, receiver = self.requests.pop(self.random.randrange(len(self.requests)))
        worker = self.workers[receiver]
        tickets = worker.received(ticket)
        if self.random.random() < 0.5:
            worker.busy()
            self.running.append(receiver)
        if self.random.random() < 0.3:
            self._send_some(receiver)  # a message may cause another without a task
        self._acknowledge([*tickets, *worker.settle()])

    def _deliver_ack(self) -> None:
        ticket = self.acks.pop(self.random.randrange(len(self.acks)))
        self._acknowledge(self.workers[self.sender[ticket]].acknowledged())

    def _end_task(self) -> None:
        worker = self.running.pop(self.random.randrange(len(self.running)))
        self._send_some(worker)
        self._acknowledge(self.workers[worker].idle())


@given(count=st.integers(1, 6), budget=st.integers(0, 40), seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_quiet_is_declared_in_the_end_and_never_before(count: int, budget: int, seed: int) -> None:
    Computation(count, budget, seed).run()
