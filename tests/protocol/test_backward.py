"""The rules of a backward pass, one at a time, and together on random graphs with any order of delivery and failures.

The property tests drive one `BackwardPass` per worker as `telegrad.backward.driver` does, but every effect, message,
acknowledgement and step of an island is delayed and carried out in an order that a seed decides. So every interleaving
of threads and networks can happen here, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from hypothesis import event, given, settings
from hypothesis import strategies as st

from telegrad.protocol.backward import (
    ROOT,
    Acknowledge,
    BackwardPass,
    Entry,
    IdleReport,
    PassDone,
    PassEffect,
    PassStuck,
    ResumePass,
    StartIsland,
    StartProbe,
)

# One rule at a time


def make(entries: dict[int, set[Entry]], me: int = 1) -> BackwardPass[str]:
    state: BackwardPass[str] = BackwardPass(me)
    state.plan(entries)
    return state


def begun(entries: dict[int, set[Entry]]) -> tuple[BackwardPass[str], list[PassEffect[str]]]:
    state = make(entries, 0)
    return state, state.begin()


def test_an_island_starts_when_all_its_entries_have_arrived() -> None:
    state = make({7: {10, 11}})
    assert state.gradient("m10", 10) == [Acknowledge("m10")]  # nothing runs, so it is acknowledged at once
    assert state.partly_fed()
    assert state.gradient("m11", 11) == [StartIsland(7)]
    assert not state.partly_fed()
    assert state.island_finished() == [Acknowledge("m11")]


def test_an_island_starts_once() -> None:
    state = make({7: {10}})
    assert state.gradient("first", 10) == [StartIsland(7)]
    assert state.gradient("second", 10) == [Acknowledge("second")]


def test_a_gradient_that_does_not_engage_is_acknowledged_at_once() -> None:
    state = make({7: {10}, 8: {11, 12}})
    state.gradient("engages", 10)
    assert state.gradient("other", 11) == [Acknowledge("other")]


def test_the_pass_is_over_when_the_group_is_quiet_and_no_island_is_partly_fed() -> None:
    state, effects = begun({0: {ROOT}})
    assert effects == [StartIsland(0)]
    state.flow.sent()
    assert state.island_finished() == []
    assert state.acknowledged({1: IdleReport(1, False)}) == [PassDone()]
    assert not state.engaged


def test_the_probe_starts_when_the_group_is_quiet_and_another_worker_is_partly_fed() -> None:
    state, _ = begun({0: {ROOT}})
    state.flow.sent()
    state.island_finished()
    assert state.acknowledged({1: IdleReport(1, True)}) == [StartProbe()]
    assert state.engaged


def test_the_probe_starts_at_once_when_the_root_itself_must_wait() -> None:
    _, effects = begun({0: {ROOT, 10}})
    assert effects == [StartProbe()]


def probed_start(entries: dict[int, set[Entry]]) -> BackwardPass[str]:
    """Return a starter whose probe is over, before it tells worker 1."""
    state, effects = begun(entries)
    assert effects == [StartProbe()]
    state.probe_sent()
    assert state.probe_walked() == []
    assert state.probe_acknowledged({1: IdleReport(1, False)}) == [ResumePass((1,))]
    return state


def test_every_worker_that_took_part_is_told_when_the_probe_is_over() -> None:
    state = probed_start({0: {ROOT, 10}})
    assert state.replan({1: {ROOT}}) == [StartIsland(1)]  # 10 was not reached
    state.flow.sent()
    assert state.resume_sent() == []
    assert state.island_finished() == []
    assert state.acknowledged({1: IdleReport(2, False)}) == [PassDone()]


def test_the_pass_is_not_over_before_every_worker_is_told() -> None:
    state = probed_start({0: {ROOT, 10}})
    state.replan({1: {ROOT}})
    assert state.island_finished() == []
    assert state.resume_sent() == [PassDone()]


def test_after_the_probe_an_island_starts_with_gates_for_missing_entries() -> None:
    state = probed_start({0: {ROOT, 10, 11}})
    assert state.replan({1: {ROOT, 10}}) == [StartIsland(1, (10,))]
    state.resume_sent()
    assert state.gradient("m10", 10) == [Acknowledge("m10")]  # it opens the gate, and starts nothing
    assert state.island_finished() == [PassDone()]


def test_after_the_probe_an_island_without_gradients_waits_for_the_first() -> None:
    state = make({7: {10, 11, 12}})
    assert state.replan({8: {10, 11}}) == []
    assert 12 not in state.island_of
    assert state.resume_received("resume") == [Acknowledge("resume")]
    assert state.gradient("m10", 10) == [StartIsland(8, (11,))]


def test_gradients_that_arrived_before_a_new_plan_are_kept() -> None:
    state = make({7: {10, 11}})
    state.gradient("m10", 10)
    assert state.replan({8: {10}}) == [StartIsland(8)]


def test_an_island_that_has_started_is_not_planned_again() -> None:
    state = make({7: {10}, 8: {11, 12}})
    state.gradient("m10", 10)
    assert state.started_entries() == {10}
    assert state.replan({9: {11}}) == []
    assert state.gradient("again", 10) == [Acknowledge("again")]
    assert 10 in state.island_of


def test_islands_of_later_entries_can_be_added() -> None:
    state = make({7: {10}})
    assert 20 not in state.island_of
    state.add_island(8, [20])
    assert state.gradient("m20", 20) == [StartIsland(8)]


def test_a_gradient_for_an_unknown_entry_is_acknowledged_and_starts_nothing() -> None:
    state = make({7: {10}})
    assert state.gradient("m99", 99) == [Acknowledge("m99")]


def test_islands_that_are_partly_fed_after_the_probe_are_reported_as_stuck() -> None:
    state = probed_start({0: {ROOT, 10}})
    state.replan({1: {ROOT}})
    state.flow.sent()
    state.resume_sent()
    state.island_finished()
    assert state.acknowledged({1: IdleReport(2, True), 4: IdleReport(1, True)}) == [PassStuck((1, 4))]


def test_a_probe_that_engages_is_acknowledged_after_its_walk_and_the_probes_that_it_sent() -> None:
    state = make({7: {10}})
    assert state.probe_received("p1") == []
    assert state.probe_received("p2") == [Acknowledge("p2")]
    state.probe_sent()
    assert state.probe_walked() == []
    assert state.probe_walked() == []
    assert state.unacknowledged == 1
    assert state.probe_acknowledged({}) == [Acknowledge("p1")]


def test_gradients_and_probes_are_acknowledged_independently() -> None:
    state = make({7: {10}})
    state.gradient("gradient", 10)
    state.probe_received("probe")
    assert state.probe_walked() == [Acknowledge("probe")]
    assert state.island_finished() == [Acknowledge("gradient")]


@given(st.permutations([IdleReport(number, number % 2 == 1) for number in range(1, 6)]))
def test_an_old_report_never_replaces_a_newer_one(reports: list[IdleReport]) -> None:
    state, _ = begun({0: {ROOT}})
    for report in reports:
        state.flow.sent()
        state.acknowledged({1: report})
    assert state.reports()[1] == IdleReport(5, True)
    assert state.island_finished() == [StartProbe()]


def test_a_report_has_the_current_state_and_the_reports_of_others() -> None:
    state = make({7: {10, 11}}, me=3)
    first = state.reports()
    state.gradient("m10", 10)
    state.flow.sent()
    state.acknowledged({5: IdleReport(4, True)})
    second = state.reports()
    assert not first[3].partly_fed
    assert second[3].partly_fed
    assert second[3].number > first[3].number
    assert second[5] == IdleReport(4, True)


def test_a_failure_acknowledges_both_the_gradient_and_the_probe_that_engaged() -> None:
    state = make({7: {10}})
    state.gradient("gradient", 10)
    state.probe_received("probe")
    assert state.abort() == [Acknowledge("gradient"), Acknowledge("probe")]
    assert not state.engaged
    assert state.abort() == []


def test_after_a_failure_late_messages_are_acknowledged_while_an_island_runs() -> None:
    state = make({7: {10}, 8: {11}})
    state.gradient("m10", 10)
    state.flow.sent()  # to a lost worker: never acknowledged
    state.abort()
    assert state.late_message("late") == [Acknowledge("late")]
    assert state.gradient("m11", 11) == [Acknowledge("m11")]  # and its island does not start
    assert state.probe_received("probe") == [Acknowledge("probe")]
    assert state.probe_walked() == []
    assert state.resume_received("resume") == [Acknowledge("resume")]
    assert state.island_finished() == []


def test_after_a_failure_the_starter_acknowledges_late_messages_and_does_not_continue() -> None:
    state, _ = begun({0: {ROOT}})
    state.flow.sent()
    assert state.abort() == []
    assert state.late_message("late") == [Acknowledge("late")]
    assert state.island_finished() == []
    assert state.acknowledged({1: IdleReport(1, True)}) == []


def test_a_probe_that_failed_does_not_end() -> None:
    state, _ = begun({0: {ROOT, 10}})
    state.abort()
    assert state.probe_walked() == []
    assert state.replan({1: {ROOT}}) == []


def test_after_the_end_late_messages_are_acknowledged_and_start_nothing() -> None:
    state, _ = begun({0: {ROOT}, 1: {10}})
    assert state.island_finished() == [PassDone()]
    assert state.late_message("late") == [Acknowledge("late")]
    assert state.gradient("m10", 10) == [Acknowledge("m10")]


def test_a_late_probe_neither_engages_the_starter_nor_ends_the_probe_again() -> None:
    state = probed_start({0: {ROOT, 10}})
    assert state.probe_received("before replanning") == [Acknowledge("before replanning")]
    assert state.probe_walked() == []
    state.replan({1: {ROOT}})
    assert state.probe_received("after") == [Acknowledge("after")]
    assert state.probe_walked() == []
    state.resume_sent()
    assert state.island_finished() == [PassDone()]


def test_a_gradient_whose_entry_is_dead_after_the_probe_is_dropped() -> None:
    state = make({7: {10, 11}})
    state.gradient("m10", 10)
    assert state.replan({8: {11}}) == []
    assert 10 not in state.island_of
    assert not state.partly_fed()
    assert state.gradient("m11", 11) == [StartIsland(8)]


def test_the_number_of_running_islands_is_known() -> None:
    state = make({7: {10}, 8: {11}})
    assert state.running == 0
    state.gradient("m10", 10)
    state.gradient("m11", 11)
    assert state.running == 2
    state.island_finished()
    assert state.running == 1


# The model: a graph over workers


@dataclass(frozen=True)
class Message:
    """One send. Its sender computed it from messages that it had received, through its nodes."""

    sender: int
    receiver: int
    uses: frozenset[int]
    nodes: frozenset[int]


@dataclass(frozen=True)
class Graph:
    """Messages in the order in which they were sent, and the root, which belongs to worker 0."""

    workers: int
    messages: tuple[Message, ...]
    root: Message
    order: tuple[int, ...]
    """The record number of each message. Messages that it uses have smaller numbers."""

    def at(self, entry: Entry) -> Message:
        return self.root if entry == ROOT else self.messages[entry]  # type: ignore[call-overload]  # the others are numbers

    def entries_of(self, worker: int) -> set[Entry]:
        sent: set[Entry] = {number for number, message in enumerate(self.messages) if message.sender == worker}
        return sent | {ROOT} if worker == 0 else sent

    def reached(self) -> set[Entry]:
        """Return what a single process would run."""
        found: set[Entry] = {ROOT}
        stack = [self.root]
        while stack:
            for number in stack.pop().uses - found:
                found.add(number)
                stack.append(self.messages[number])
        return found

    def islands(self, entries: Iterable[Entry]) -> list[set[Entry]]:
        """Group the entries of one worker that share a node or a recv."""
        found: list[tuple[set[Entry], set[object]]] = []
        for entry in entries:
            message = self.at(entry)
            mine: tuple[set[Entry], set[object]] = {entry}, {*message.uses, *(("node", n) for n in message.nodes)}
            for other in [one for one in found if one[1] & mine[1]]:
                found.remove(other)
                mine = mine[0] | other[0], mine[1] | other[1]
            found.append(mine)
        return [island for island, _ in found]

    def neighbours(self, worker: int) -> set[int]:
        pairs = [(message.sender, message.receiver) for message in self.messages]
        return {a for a, b in pairs if b == worker} | {b for a, b in pairs if a == worker}


@st.composite
def graphs(draw: st.DrawFn, *, shared: bool = True) -> Graph:
    workers = draw(st.integers(1, 6))
    messages: list[Message] = []
    used: set[int] = set()

    def uses(worker: int) -> frozenset[int]:
        there = [n for n, message in enumerate(messages) if message.receiver == worker and (shared or n not in used)]
        least = draw(st.sampled_from([1, 1, 1, 0]))
        found = draw(st.frozensets(st.sampled_from(there), min_size=least, max_size=4)) if there else frozenset()
        used.update(found)
        return found

    def nodes() -> frozenset[int]:
        return draw(st.frozensets(st.integers(0, 3), max_size=2)) if shared else frozenset()

    length = draw(st.integers(0, 20))
    here = draw(st.integers(0, workers - 1))
    for number in range(length):
        # The receiver of the last message usually sends the next: long chains, which end where the pass begins.
        sender = draw(st.sampled_from([here, here, here, *range(workers)]))
        here = draw(st.integers(0, workers - 1)) if number + 1 < length else 0
        messages.append(Message(sender, here, uses(sender), nodes()))
    root = Message(0, 0, uses(0), nodes())
    return Graph(workers, tuple(messages), root, record_order(messages, draw(st.integers(0, 2**32))))


def record_order(messages: list[Message], seed: int) -> tuple[int, ...]:
    """Return a random order that respects causality."""
    random = Random(seed)
    missing = {number: len(message.uses) for number, message in enumerate(messages)}
    ready = [(random.random(), number) for number, uses in missing.items() if not uses]
    heapq.heapify(ready)
    order: dict[int, int] = {}
    while ready:
        _, number = heapq.heappop(ready)
        order[number] = len(order)
        for later, message in enumerate(messages):
            if number in message.uses:
                missing[later] -= 1
                if not missing[later]:
                    heapq.heappush(ready, (random.random(), later))
    return tuple(order[number] for number in range(len(messages)))


# The model: the agents


NOBODY = -1


@dataclass
class Asked:
    """A message that must be acknowledged. Nobody waits for those of `kind` "late"."""

    kind: str
    sender: int
    receiver: int
    given: bool = False
    arrived: bool = False


@dataclass
class Running:
    """An island in the engine. It runs until the next gate."""

    worker: int
    entries: set[Entry]
    opened: set[Entry]
    gates: list[int]
    sent: set[int] = field(default_factory=set)


@dataclass
class Step:
    """Something in progress: `kind` is the computation that it belongs to, `worker` carries it out."""

    kind: str
    worker: int
    act: Callable[[], None]


class World:
    """One pass over all workers of a graph."""

    def __init__(self, graph: Graph, seed: int) -> None:
        self.graph = graph
        self.random = Random(seed)
        self.passes: list[BackwardPass[int]] = [BackwardPass(worker) for worker in range(graph.workers)]
        self.steps: list[Step] = []
        self.asked: list[Asked] = []
        self.numbers = count()
        self.islands: dict[int, set[Entry]] = {}
        self.arrived: set[Entry] = set()
        self.live: set[int] = set()
        self.blocked: dict[int, Running] = {}
        self.sent: list[int] = []
        self.completed: list[Entry] = []
        self.failed: set[int] = set()
        self.dead: set[int] = set()
        self.probes = self.resumes = self.done = 0

    def run(self, *disturbances: Callable[[], None]) -> None:
        """Carry out all steps, with each disturbance at a random time."""
        # Most passes take less than a hundred steps, and early disturbances are more interesting.
        times = [(self.random.randrange(2 ** self.random.randint(0, 7)), disturb) for disturb in disturbances]
        times.sort(key=lambda time: time[0])
        self.begin_here()
        for turn in range(20_000):
            while times and (times[0][0] <= turn or not self.steps):
                times.pop(0)[1]()
            if not self.steps:
                return
            self.steps.pop(self.random.randrange(len(self.steps))).act()
            for state in self.passes:
                waiting = [island for island in state._islands.values() if island.arrived and not island.started]
                assert state.partly_fed() == bool(waiting), "what is counted is what is there"
        raise AssertionError("the pass never ends")

    def begin_here(self) -> None:
        self._plan(0)
        self.arrived.add(ROOT)
        self._carry_out(0, self.passes[0].begin())

    def _later(self, kind: str, worker: int, act: Callable[[], None]) -> None:
        if worker not in self.dead:
            self.steps.append(Step(kind, worker, act))

    def _under_way(self, kind: str) -> list[Step]:
        return [step for step in self.steps if step.kind == kind]

    # effects

    def _carry_out(self, worker: int, effects: Iterable[PassEffect[int]]) -> None:
        for effect in effects:
            match effect:
                case Acknowledge(ticket):
                    asked = self.asked[ticket]
                    assert not asked.given, "acknowledged twice"
                    assert asked.receiver == worker
                    asked.given = True
                    self._later(asked.kind, worker, partial(self._answer, worker, ticket))
                case StartIsland(number, waiting):
                    assert worker not in self.failed, "an island starts after a failure"
                    self._later("flow", worker, partial(self._start_island, worker, number, waiting))
                case StartProbe():
                    self._check_quiet(worker)
                    self.probes += 1
                    assert self.probes == 1, "a second probe"
                    self._later("probe", worker, partial(self._walk, worker, ROOT))
                case ResumePass(workers):
                    assert worker == 0
                    assert not self._under_way("probe"), "the probe ended while it was in progress"
                    self.resumes += 1
                    assert self.resumes == 1, "the probe ended twice"
                    self._later("flow", worker, partial(self._resume, workers))
                case PassDone():
                    self._check_quiet(worker)
                    self.done += 1
                    assert self.done == 1
                    assert sorted(self.completed, key=str) == sorted(self.graph.reached(), key=str)
                case PassStuck(workers):
                    raise AssertionError(f"{workers} are stuck")

    def _check_quiet(self, worker: int) -> None:
        assert worker == 0, "only the starter can be quiet"
        assert not self._under_way("flow"), "quiet, with something in progress"
        assert not self.blocked, "quiet, with an island at a gate"
        assert not self.failed & {0}, "the end of a pass that has failed"

    def _ask(self, kind: str, sender: int, receiver: int, deliver: Callable[[int], None]) -> None:
        ticket = len(self.asked)
        self.asked.append(Asked(kind, sender, receiver))
        if receiver in self.dead:
            if sender != NOBODY:
                self._later("failure", sender, partial(self.fail, sender))
        else:
            self._later(kind, receiver, partial(deliver, ticket))

    def _answer(self, worker: int, ticket: int) -> None:
        asked, reports, failed = self.asked[ticket], self.passes[worker].reports(), worker in self.failed
        number = self.passes[worker].flow.count_for(asked.sender)
        self._later(asked.kind, asked.sender, partial(self._take_answer, asked, reports, failed, worker, number))

    def _take_answer(self, asked: Asked, reports: dict[int, IdleReport], failed: bool, by: int, number: int) -> None:
        assert not asked.arrived, "an acknowledgement arrived twice"
        asked.arrived = True
        if asked.kind == "late":
            return
        if failed:
            self.fail(asked.sender)
        state = self.passes[asked.sender]
        answered = state.acknowledged if asked.kind == "flow" else state.probe_acknowledged
        self._carry_out(asked.sender, answered(reports, by, number))

    # gradients

    def _number(self, islands: list[set[Entry]]) -> dict[int, set[Entry]]:
        made = {next(self.numbers): island for island in islands}
        self.islands.update(made)
        return made

    def _plan(self, worker: int) -> None:
        self.passes[worker].plan(self._number(self.graph.islands(self._entries_of(worker))))

    def _entries_of(self, worker: int) -> set[Entry]:
        return self.graph.entries_of(worker)

    def _replan(self, worker: int) -> list[PassEffect[int]]:
        state = self.passes[worker]
        alive = self._entries_of(worker) & (self.arrived | self.live) - state.started_entries()
        return state.replan(self._number(self.graph.islands(alive)))

    def _start_island(self, worker: int, number: int, waiting: tuple[Entry, ...]) -> None:
        entries = self.islands[number]
        assert entries - set(waiting) <= self.arrived, "an island runs without a gradient or a gate for it"
        gates = sorted(
            (entry for entry in waiting if isinstance(entry, int)), key=self.graph.order.__getitem__, reverse=True
        )
        self._advance(Running(worker, entries, entries - set(waiting), gates))

    def _advance(self, island: Running) -> None:
        """One step of the engine: one recv, or one gate, or the end."""
        again = partial(self._later, "flow", island.worker, partial(self._advance, island))
        recvs = {number for entry in island.entries for number in self.graph.at(entry).uses} - island.sent
        ready = [
            number
            for number in sorted(recvs)
            if all(number not in self.graph.at(entry).uses for entry in island.entries - island.opened)
        ]
        if island.worker in self.failed:
            self._carry_out(island.worker, self.passes[island.worker].island_finished())
        elif ready:
            island.sent.add(number := self.random.choice(ready))
            self._send_gradient(island.worker, number)
            again()
        elif island.gates and island.gates[0] in self.arrived:
            island.opened.add(island.gates.pop(0))
            again()
        elif island.gates:
            self.blocked[island.gates[0]] = island
        else:
            self.completed += island.entries
            self._carry_out(island.worker, self.passes[island.worker].island_finished())

    def _send_gradient(self, worker: int, number: int) -> None:
        assert number not in self.sent, "a gradient is sent twice"
        self.sent.append(number)
        state = self.passes[worker]
        receiver = self.graph.messages[number].sender
        take = partial(self._take_gradient, receiver, number, state.liveness_known, worker)
        if state.flow.sent(receiver):
            self._ask("flow", worker, receiver, take)
        else:
            event("a counted message")
            self._later("flow", receiver, partial(take, None))

    def _take_gradient(self, worker: int, number: int, known: bool, sender: int, ticket: int | None) -> None:
        state = self.passes[worker]
        if worker in self.failed:
            self._carry_out(worker, state.late_message(ticket, sender))
            return
        self.arrived.add(number)
        effects: list[PassEffect[int]] = []
        if known and not state.liveness_known:
            effects += self._replan(worker)
        elif not state.planned:
            self._plan(worker)
        assert number in state.island_of
        effects += state.gradient(ticket, number, sender)
        if number in self.blocked:
            self._later("flow", worker, partial(self._advance, self.blocked.pop(number)))
        self._carry_out(worker, effects)

    # the probe

    def _walk(self, worker: int, entry: Entry) -> None:
        if entry not in self.live and worker not in self.failed:
            if entry != ROOT:
                self.live.add(entry)  # type: ignore[arg-type]
            for number in self.graph.at(entry).uses:
                self.passes[worker].probe_sent()
                receiver = self.graph.messages[number].sender
                self._ask("probe", worker, receiver, partial(self._take_probe, receiver, number))
        self._later("probe", worker, partial(self._walked, worker))

    def _walked(self, worker: int) -> None:
        self._carry_out(worker, self.passes[worker].probe_walked())

    def _take_probe(self, worker: int, number: int, ticket: int) -> None:
        self._carry_out(worker, self.passes[worker].probe_received(ticket))
        self._later(self.asked[ticket].kind, worker, partial(self._walk, worker, number))

    def _resume(self, workers: tuple[int, ...]) -> None:
        effects = self._replan(0)
        for worker in workers:
            self.passes[0].flow.sent()
            self._ask("flow", 0, worker, partial(self._take_resume, worker))
        self._carry_out(0, effects)
        self._later("flow", 0, self._resumed_here)

    def _resumed_here(self) -> None:
        self._carry_out(0, self.passes[0].resume_sent())

    def _take_resume(self, worker: int, ticket: int) -> None:
        state = self.passes[worker]
        effects = [] if state.liveness_known else self._replan(worker)
        self._carry_out(worker, [*effects, *state.resume_received(ticket)])

    # disturbances

    def send_late_message(self) -> None:
        """Deliver a gradient again."""
        worker = self.random.randrange(self.graph.workers)
        self._ask(
            "late", NOBODY, worker, lambda ticket: self._carry_out(worker, self.passes[worker].late_message(ticket))
        )

    def send_late_probe(self) -> None:
        """Deliver a probe again, when the probe is over."""
        worker = self.random.randrange(self.graph.workers)

        def deliver(ticket: int) -> None:
            if self.resumes and (worker == 0 or self.passes[worker].liveness_known):
                self._carry_out(worker, self.passes[worker].probe_received(ticket))
                self._later("late", worker, partial(self._walked, worker))
            else:
                self.asked[ticket].given = self.asked[ticket].arrived = True  # it was never sent

        self._ask("late", NOBODY, worker, deliver)

    def fail_somewhere(self) -> None:
        self.fail(self.random.randrange(self.graph.workers))

    def fail(self, worker: int) -> None:
        """Fail at a worker that takes part in the pass, or learn of a failure there."""
        if worker in self.failed or worker in self.dead or (worker == 0 and self.done):
            return
        self.failed.add(worker)
        self._carry_out(worker, self.passes[worker].abort())
        for entry, island in list(self.blocked.items()):
            if island.worker == worker:
                del self.blocked[entry]
                self._later("flow", worker, partial(self._advance, island))
        for other in {0, *self.graph.neighbours(worker)} - {worker}:
            self._later("failure", other, partial(self.fail, other))

    def lose_somebody(self) -> None:
        """Kill a worker: its steps are dropped, and the workers that wait for it are notified."""
        # The hard case is a chain: a worker waits for the dead one, and others wait for that worker.
        chained = {asked.receiver for asked in self.asked if not asked.arrived and asked.sender > 0}
        if not chained and self.steps and not self.done:
            self._later("disturbance", NOBODY, self.lose_somebody)
            return
        worker = self.random.choice(sorted(chained) or range(self.graph.workers))
        self.dead.add(worker)
        self.steps = [step for step in self.steps if step.worker != worker]
        self.blocked = {entry: island for entry, island in self.blocked.items() if island.worker != worker}
        # An acknowledgement that was sent still arrives: it is a step of its receiver.
        waiting = {asked.sender for asked in self.asked if asked.receiver == worker and not asked.arrived}
        engaged = {other for other in self.graph.neighbours(worker) if self.passes[other].engaged}
        for other in sorted((waiting | engaged) - {NOBODY, worker}):
            self._later("failure", other, partial(self.fail, other))

    def check_nobody_waits(self) -> None:
        """Check what must hold at the end of every pass, however it ended."""
        for number, asked in enumerate(self.asked):
            if not {asked.sender, asked.receiver} & self.dead:
                assert asked.arrived, f"message {number} was not acknowledged: {asked}"
        assert not self.blocked, "an island waits forever"
        for worker, state in enumerate(self.passes):
            if worker not in self.dead:
                assert not state.engaged


SEEDS = st.integers(0, 2**32)


@given(graphs(), SEEDS)
@settings(max_examples=200, deadline=None)
def test_every_reached_island_runs_once_and_the_pass_ends_once(graph: Graph, seed: int) -> None:
    world = World(graph, seed)
    world.run()
    event(f"{world.probes} probes")
    assert world.done == 1
    assert sorted(world.sent) == sorted(graph.reached() - {ROOT})  # type: ignore[type-var]  # only numbers are left
    world.check_nobody_waits()


@given(graphs(shared=False), SEEDS)
@settings(max_examples=50, deadline=None)
def test_a_pass_whose_islands_have_one_entry_each_needs_no_probe(graph: Graph, seed: int) -> None:
    world = World(graph, seed)
    world.run()
    assert (world.done, world.probes) == (1, 0)


@given(graphs(), SEEDS)
@settings(max_examples=150, deadline=None)
def test_late_and_repeated_messages_are_acknowledged_and_change_nothing(graph: Graph, seed: int) -> None:
    world = World(graph, seed)
    world.run(*[world.send_late_message] * 3, *[world.send_late_probe] * 3)
    assert world.done == 1
    world.check_nobody_waits()


@given(graphs(), SEEDS)
@settings(max_examples=150, deadline=None)
def test_after_a_failure_every_message_is_acknowledged_and_no_worker_sees_success(graph: Graph, seed: int) -> None:
    world = World(graph, seed)
    world.run(world.fail_somewhere, world.send_late_message, world.send_late_probe)
    event("done before" if world.done else "failed")
    assert world.done or 0 in world.failed
    world.check_nobody_waits()


@given(graphs(), SEEDS)
@settings(max_examples=150, deadline=None)
def test_after_the_loss_of_a_worker_nobody_waits_forever(graph: Graph, seed: int) -> None:
    world = World(graph, seed)
    world.run(world.lose_somebody, world.send_late_message, world.send_late_probe)
    event("done" if world.done else "failed")
    assert world.done or world.dead & {0} or 0 in world.failed
    world.check_nobody_waits()
