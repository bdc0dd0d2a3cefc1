"""The rules of ownership, one at a time, and together on up to six workers with any order of delivery, losses and
restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from telegrad.protocol.ownership import Ownership
from telegrad.protocol.ownership_effects import (
    AcceptChild,
    AcceptFork,
    DeleteFork,
    ForkConfirmed,
    ForkRefused,
    OwnershipEffect,
    RequestFork,
    ValueFreed,
    ValueOrphaned,
    ValueUnknown,
)
from telegrad.protocol.rref_ids import COUNTER_BITS, ForkData, ForkId, RRefId

# One rule at a time


def test_a_worker_cannot_drop_the_fork_of_another() -> None:
    owner = Ownership(0)
    owner.own((0, 0, 0))
    owner.prepare_fork((0, 0, 0), None, to=1, fork=(0, 1))
    owner.release_handle((0, 0, 0))
    assert owner.fork_deleted(2, (0, 0, 0), (0, 1)) == []
    assert owner.owned() == {(0, 0, 0): [1]}
    assert owner.fork_deleted(1, (0, 0, 0), (0, 1)) == [ValueFreed((0, 0, 0))]


def test_a_value_of_a_worker_that_is_gone_is_not_expected() -> None:
    owner = Ownership(0, lambda worker: worker == 7)
    assert not owner.is_pending((7, 0, 0))
    assert owner.fork_requested(1, (7, 0, 0), (1, 1)) == [AcceptFork(1, (1, 1), True)]
    assert owner.owned() == {}


def test_a_value_is_freed_with_its_last_handle_on_the_owner() -> None:
    owner = Ownership(0)
    owner.own((0, 0, 0))
    assert owner.release_handle((0, 0, 0)) == [ValueFreed((0, 0, 0))]
    assert owner.owned() == {}


def test_a_value_is_kept_while_it_is_computed_even_if_nobody_refers_to_it() -> None:
    owner = Ownership(0)
    owner.creation_received((1, 0, 0), (1, 5), caller=1)
    assert owner.fork_deleted(1, (1, 0, 0), (1, 5)) == []
    assert owner.value_computed((1, 0, 0)) == [ValueFreed((1, 0, 0))]


def test_a_fork_is_kept_until_the_owner_knows_the_fork_made_from_it() -> None:
    user = Ownership(1)
    user.start_creation((1, 0, 0), (1, 5), owner=0)
    user.prepare_fork((1, 0, 0), (1, 5), to=2, fork=(1, 6))
    assert user.drop_fork((1, 5)) == []
    assert user.child_accepted((1, 6)) == [DeleteFork(0, (1, 0, 0), (1, 5))]
    assert user.held_forks() == {}


def test_a_fork_that_is_dropped_at_once_is_confirmed_before_it_is_deleted() -> None:
    user = Ownership(2)
    assert user.fork_received(1, ForkData((1, 0, 0), (1, 6), 0)) == [RequestFork(0, (1, 0, 0), (1, 6))]
    assert user.drop_fork((1, 6)) == []
    assert user.fork_accepted((1, 6), refused=False) == [
        AcceptChild(1, (1, 6)),
        ForkConfirmed((1, 6)),
        DeleteFork(0, (1, 0, 0), (1, 6)),
    ]


def test_an_owner_accepts_a_fork_before_the_call_that_creates_the_value() -> None:
    owner = Ownership(0)
    assert owner.fork_requested(2, (1, 0, 0), (1, 6)) == [AcceptFork(2, (1, 6), False)]
    owner.creation_received((1, 0, 0), (1, 5), caller=1)
    assert owner.owned() == {(1, 0, 0): [1, 2]}


def test_a_deletion_that_arrives_before_the_creation_is_remembered() -> None:
    owner = Ownership(0)
    assert owner.fork_deleted(1, (1, 0, 0), (1, 5)) == []
    owner.creation_received((1, 0, 0), (1, 5), caller=1)
    assert owner.value_computed((1, 0, 0)) == [ValueFreed((1, 0, 0))]


def test_the_forks_of_a_lost_worker_are_dropped() -> None:
    owner = Ownership(0)
    owner.creation_received((1, 0, 0), (1, 5), caller=1)
    owner.value_computed((1, 0, 0))
    assert owner.worker_lost(1) == [ValueFreed((1, 0, 0))]


def test_a_fork_that_a_lost_worker_sent_is_refused_if_the_value_is_gone() -> None:
    owner = Ownership(0)
    owner.own((0, 0, 0))
    owner.prepare_fork((0, 0, 0), None, to=1, fork=(0, 1))
    owner.release_handle((0, 0, 0))
    assert owner.worker_lost(1) == [ValueFreed((0, 0, 0))]
    assert owner.fork_requested(2, (0, 0, 0), (1, 0)) == [AcceptFork(2, (1, 0), True)]


def test_a_fork_that_a_lost_worker_sent_is_refused_if_the_creator_dropped_the_value() -> None:
    """The owner never knew the lost worker's fork, and the creator was right to delete its own."""
    owner = Ownership(0)
    owner.creation_received((1, 0, 0), (1, 5), caller=1)
    owner.value_computed((1, 0, 0))
    owner.worker_lost(2)
    assert owner.fork_deleted(1, (1, 0, 0), (1, 5)) == [ValueFreed((1, 0, 0))]
    assert owner.fork_requested(3, (1, 0, 0), (2, 0)) == [AcceptFork(3, (2, 0), True)]
    assert owner.owned() == {}


def test_a_handle_that_reaches_the_owner_too_late_is_orphaned() -> None:
    owner = Ownership(0)
    owner.creation_received((1, 0, 0), (1, 5), caller=1)
    owner.value_computed((1, 0, 0))
    owner.fork_deleted(1, (1, 0, 0), (1, 5))
    assert owner.fork_received(2, ForkData((1, 0, 0), (2, 0), 0)) == [AcceptChild(2, (2, 0)), ValueUnknown((1, 0, 0))]
    assert owner.release_handle((1, 0, 0)) == [ValueFreed((1, 0, 0))]


def test_forks_of_a_lost_owner_are_refused() -> None:
    user = Ownership(1)
    user.start_creation((1, 0, 0), (1, 5), owner=0)
    assert user.worker_lost(0) == [ForkRefused((1, 5), True)]
    assert user.drop_fork((1, 5)) == []
    assert user.held_forks() == {}


def test_a_value_whose_creating_call_will_never_arrive_is_orphaned() -> None:
    owner = Ownership(0)
    rref, fork = (1, 7 << COUNTER_BITS, 0), (1, 7 << COUNTER_BITS | 1)
    owner.fork_requested(2, rref, fork)
    assert owner.worker_lost(1, incarnation=7) == [ValueOrphaned(rref)]
    assert owner.fork_deleted(2, rref, fork) == [ValueFreed(rref)]


def test_a_restarted_owner_refuses_values_of_its_previous_incarnation() -> None:
    owner = Ownership(0, incarnation=8)
    assert owner.fork_requested(2, (1, 0, 7), (1, 6)) == [AcceptFork(2, (1, 6), True)]
    assert owner.fork_received(2, ForkData((1, 0, 7), (2, 0), 0)) == [AcceptChild(2, (2, 0)), ValueUnknown((1, 0, 7))]


def test_an_owner_knows_whether_a_creating_call_is_pending() -> None:
    owner = Ownership(0)
    assert owner.is_pending((1, 0, 0))
    assert owner.is_pending((1, 2, 0))
    owner.creation_received((1, 2, 0), (1, 5), caller=1, after=0)
    assert owner.is_pending((1, 0, 0))
    assert not owner.is_pending((1, 1, 0)), "the caller created it on another owner"
    owner.value_computed((1, 2, 0))
    owner.fork_deleted(1, (1, 2, 0), (1, 5))
    assert not owner.is_pending((1, 2, 0))
    owner.worker_lost(1)
    assert not owner.is_pending((1, 0, 0))


def test_events_about_an_rref_that_is_already_gone_do_nothing() -> None:
    worker = Ownership(0)
    assert worker.value_computed((1, 0, 0)) == []
    assert worker.release_handle((1, 0, 0)) == []
    assert worker.cancel_fork(ForkData((0, 0, 0), (0, 1), 0), to=1) == []
    assert worker.fork_accepted((1, 5), refused=False) == []
    assert worker.creation_confirmed((1, 5)) == []
    assert worker.child_accepted((1, 5)) == []
    assert worker.drop_fork((1, 5)) == []
    assert (worker.owned(), worker.held_forks()) == ({}, {})


def test_a_deletion_by_a_lost_worker_is_not_remembered() -> None:
    lost: set[int] = set()
    owner = Ownership(0, lost.__contains__)
    lost.add(1)
    assert owner.fork_deleted(1, (2, 0, 0), (1, 5)) == []
    lost.clear()
    owner.creation_received((2, 0, 0), (1, 5), caller=1)
    owner.value_computed((2, 0, 0))
    assert owner.owned() == {(2, 0, 0): [1]}, "the deletion of the lost worker would have cancelled this fork"


def test_a_fork_prepared_for_a_lost_worker_is_not_counted() -> None:
    owner = Ownership(0, {1}.__contains__)
    owner.own((0, 0, 0))
    fork = owner.prepare_fork((0, 0, 0), None, to=1, fork=(0, 1))
    assert fork == ForkData((0, 0, 0), (0, 1), 0)
    assert owner.fork_count() == 0
    assert owner.release_handle((0, 0, 0)) == [ValueFreed((0, 0, 0))]


def test_a_fork_is_deleted_only_once() -> None:
    user = Ownership(1)
    user.start_creation((1, 0, 0), (1, 5), owner=0)
    user.prepare_fork((1, 0, 0), (1, 5), to=2, fork=(1, 6))
    assert user.drop_fork((1, 5)) == []
    assert user.drop_fork((1, 5)) == [], "it waits for its child"
    assert user.child_accepted((1, 6)) == [DeleteFork(0, (1, 0, 0), (1, 5))]


def test_the_reply_to_a_creation_confirms_the_fork_without_a_parent() -> None:
    user = Ownership(1)
    user.start_creation((1, 0, 0), (1, 5), owner=0)
    assert user.fork_accepted((1, 5), refused=False) == [ForkConfirmed((1, 5))]
    assert user.creation_confirmed((1, 5)) == [], "it is confirmed already"


def test_a_fork_that_was_refused_is_not_refused_again_when_its_owner_is_lost() -> None:
    user = Ownership(2)
    user.fork_received(1, ForkData((1, 0, 0), (1, 6), 0))
    assert user.fork_accepted((1, 6), refused=True) == [AcceptChild(1, (1, 6)), ForkRefused((1, 6), False)]
    assert user.worker_lost(0) == []
    assert user.drop_fork((1, 6)) == [], "nobody is left to tell"


def test_a_worker_can_be_asked_what_it_owns_and_holds() -> None:
    owner, user = Ownership(0), Ownership(1)
    owner.own((0, 0, 0))
    fork = owner.prepare_fork((0, 0, 0), None, to=1, fork=(0, 1))
    user.fork_received(0, fork)
    assert owner.owns((0, 0, 0))
    assert not user.owns((0, 0, 0))
    assert owner.has_handle((0, 0, 0), None)
    assert user.has_handle((0, 0, 0), (0, 1))
    assert not user.has_handle((0, 0, 0), (0, 2))
    assert owner.fork_count() == 1
    assert user.held_forks() == {(0, 1): ((0, 0, 0), 0)}


# Together

WORKERS = 6
Incarnation = tuple[int, int]
"""A worker, and how often it was restarted."""


NOBODY: frozenset[Incarnation] = frozenset({(-1, 0)})


@dataclass
class Handle:
    """An RRef that the program holds."""

    at: Incarnation
    owner: Incarnation
    rref: RRefId
    fork: ForkId | None
    """None: on the owner."""
    trust: frozenset[Incarnation]
    """Workers whose loss explains a missing value: those that sent it, while the owner does not know it."""


@dataclass
class Flight:
    """A message in flight."""

    source: Incarnation
    target: Incarnation
    what: Any
    handle: Handle | None = None


@dataclass(frozen=True)
class Create:
    rref: RRefId
    fork: ForkId
    after: int


@dataclass(frozen=True)
class CreationReply:
    fork: ForkId


@dataclass
class Worker:
    me: Incarnation
    rules: Ownership = field(init=False)
    gone: set[int] = field(default_factory=set)
    numbers: int = 0
    latest: dict[Incarnation, int] = field(default_factory=dict)
    computing: list[tuple[RRefId, Incarnation | None, ForkId]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rules = Ownership(self.me[0], lambda worker: worker in self.gone, self.me[1])

    def new_fork(self) -> ForkId:
        self.numbers += 1
        return self.me[0], self.me[1] << COUNTER_BITS | self.numbers

    def new_rref(self, owner: Incarnation) -> tuple[RRefId, int]:
        self.numbers += 1
        after, self.latest[owner] = self.latest.get(owner, -1), self.numbers
        return (self.me[0], self.me[1] << COUNTER_BITS | self.numbers, owner[1]), after


class World(RuleBasedStateMachine):
    """Programs on up to six workers that create, send and drop RRefs, and a network that delivers in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[int, Worker] = {}
        self.incarnations: dict[int, int] = {}
        self.flights: list[Flight] = []
        self.handles: list[Handle] = []
        self.void: set[ForkId] = set()
        self.orphans: set[tuple[Incarnation, RRefId]] = set()
        self.values: set[tuple[Incarnation, RRefId]] = set()
        self.notices: list[tuple[Incarnation, Incarnation]] = []  # (worker that will notice, worker that is lost)
        self.unsent: set[tuple[Incarnation, Incarnation]] = set()  # pairs with a creation that was not sent

    @initialize(count=st.integers(2, WORKERS), seed=st.integers(0, 1000))
    def begin(self, count: int, seed: int) -> None:
        self.random = Random(seed)
        for number in range(count):
            self.workers[number] = Worker((number, 0))
            self.incarnations[number] = 0

    # -- helpers --------------------------------------------------------------------------------------------------

    def alive(self, incarnation: Incarnation) -> bool:
        worker = self.workers.get(incarnation[0])
        return worker is not None and worker.me == incarnation

    def pick(self, number: int) -> Worker:
        living = sorted(self.workers)
        return self.workers[living[number % len(living)]]

    def send(self, source: Incarnation, target: int, what: Any, handle: Handle | None = None) -> None:
        worker = self.workers.get(target)
        if worker is not None and target not in self.workers[source[0]].gone:
            self.flights.append(Flight(source, worker.me, what, handle))

    def do(self, worker: Worker, effects: list[OwnershipEffect]) -> None:
        for effect in effects:
            match effect:
                case RequestFork(to) | AcceptFork(to) | AcceptChild(to) | DeleteFork(to):
                    assert to not in worker.gone or isinstance(effect, AcceptChild), f"{effect} is for a lost worker"
                    self.send(worker.me, to, effect)
                case ValueFreed(rref):
                    assert rref not in [job[0] for job in worker.computing], f"{rref} is freed while it is computed"
                    assert (worker.me, rref) in self.values | self.orphans, f"{rref} is freed twice, or never existed"
                    self.values.discard((worker.me, rref))
                    self.orphans.discard((worker.me, rref))
                case ValueOrphaned(rref) | ValueUnknown(rref):
                    self.orphans.add((worker.me, rref))
                case ForkRefused(fork):
                    self.void.add(fork)
                case ForkConfirmed():
                    pass

    def known(self, fork: ForkId) -> None:
        for handle in self.handles + [flight.handle for flight in self.flights if flight.handle is not None]:
            if handle.fork == fork:
                handle.trust = frozenset()

    # -- programs -------------------------------------------------------------------------------------------------

    @rule(at=st.integers(0, 60), to=st.integers(0, 60), leaves=st.integers(0, 5))
    def create(self, at: int, to: int, leaves: int) -> None:
        maker, owner = self.pick(at), self.pick(to)
        (rref, after), fork = maker.new_rref(owner.me), maker.new_fork()
        if maker is owner:
            maker.rules.own(rref, computing=leaves > 2)
            if leaves > 2:
                maker.computing.append((rref, None, fork))
            self.values.add((owner.me, rref))
            self.handles.append(Handle(maker.me, owner.me, rref, None, frozenset()))
            return
        maker.rules.start_creation(rref, fork, owner.me[0])
        if leaves == 0 or owner.me[0] in maker.gone:
            maker.rules.cancel_creation(fork)
            self.unsent.add((maker.me, owner.me))
            return
        self.send(maker.me, owner.me[0], Create(rref, fork, after))
        self.handles.append(Handle(maker.me, owner.me, rref, fork, frozenset()))

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 1000), to=st.integers(0, 60), leaves=st.integers(0, 5), keep=st.booleans())
    def send_rref(self, which: int, to: int, leaves: int, keep: bool) -> None:
        handle = self.handles[which % len(self.handles)]
        worker, target = self.workers[handle.at[0]], self.pick(to)
        name = worker.new_fork()
        fork = worker.rules.prepare_fork(handle.rref, handle.fork, to=target.me[0], fork=name)
        if leaves == 0 or target.me[0] in worker.gone:
            self.do(worker, worker.rules.cancel_fork(fork, target.me[0]))
        else:
            from_owner = handle.fork is None
            trust = frozenset() if from_owner else handle.trust | {handle.at}
            on_owner = target.me[0] == handle.owner[0]
            owner = target.me if on_owner else handle.owner  # perhaps another incarnation
            passed = Handle(target.me, owner, handle.rref, None if on_owner else name, trust)
            if handle.fork in self.void or owner != handle.owner or (handle.owner, handle.rref) in self.orphans:
                passed.trust = NOBODY  # it may be refused, because its parent is
            self.send(worker.me, target.me[0], fork, passed)
        if not keep:
            self._drop(handle)

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 1000))
    def drop(self, which: int) -> None:
        self._drop(self.handles[which % len(self.handles)])

    def _drop(self, handle: Handle) -> None:
        self.handles.remove(handle)
        worker = self.workers[handle.at[0]]
        rules = worker.rules
        self.do(worker, rules.release_handle(handle.rref) if handle.fork is None else rules.drop_fork(handle.fork))

    @precondition(lambda self: any(worker.computing for worker in self.workers.values()))
    @rule(which=st.integers(0, 1000))
    def compute(self, which: int) -> None:
        jobs = [(worker, job) for worker in self.workers.values() for job in worker.computing]
        worker, job = jobs[which % len(jobs)]
        worker.computing.remove(job)
        rref, caller, fork = job
        self.do(worker, worker.rules.value_computed(rref))
        if caller is not None and self.alive(caller):
            self.send(worker.me, caller[0], CreationReply(fork))

    # -- the network ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.flights)
    @rule(which=st.integers(0, 1000))
    def deliver(self, which: int) -> None:
        self._deliver(self.flights.pop(which % len(self.flights)))

    @precondition(lambda self: self.flights)
    @rule()
    def deliver_the_latest(self) -> None:
        self._deliver(self.flights.pop())

    def _deliver(self, flight: Flight) -> None:
        worker, sender = self.workers[flight.target[0]], flight.source[0]
        rules = worker.rules
        match flight.what:
            case Create(rref, fork, after):
                self.values.add((worker.me, rref))
                self.orphans.discard((worker.me, rref))
                rules.creation_received(rref, fork, sender, after)
                worker.computing.append((rref, flight.source, fork))
            case CreationReply(fork):
                self.do(worker, rules.creation_confirmed(fork))
            case ForkData() as fork:
                assert flight.handle is not None
                self.handles.append(flight.handle)
                if flight.handle.fork is None and (worker.me, fork.rref) in self.values:
                    flight.handle.trust = frozenset()
                self.do(worker, rules.fork_received(sender, fork))
            case RequestFork(_, rref, fork):
                effects = rules.fork_requested(sender, rref, fork)
                if not effects[0].refused:  # type: ignore[union-attr]
                    self.known(fork)
                self.do(worker, effects)
            case AcceptFork(_, fork, refused):
                self.do(worker, rules.fork_accepted(fork, refused=refused))
            case AcceptChild(_, fork):
                self.do(worker, rules.child_accepted(fork))
            case DeleteFork(_, rref, fork):
                self.do(worker, rules.fork_deleted(sender, rref, fork))

    # -- loss -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.workers) > 1)
    @rule(which=st.integers(0, 60), often=st.integers(0, 3))
    def lose(self, which: int, often: int) -> None:
        if often:
            return
        worker = self.pick(which)
        del self.workers[worker.me[0]]
        self.notices = [(who, whom) for who, whom in self.notices if who != worker.me]
        self.notices += [(other.me, worker.me) for other in self.workers.values()]
        self.flights = [flight for flight in self.flights if flight.target != worker.me]
        self.handles = [handle for handle in self.handles if handle.at != worker.me]
        self.values = {value for value in self.values if value[0] != worker.me}
        self.orphans = {value for value in self.orphans if value[0] != worker.me}

    @precondition(lambda self: self.notices)
    @rule(which=st.integers(0, 60))
    def notice(self, which: int) -> None:
        self._notice(self.notices.pop(which % len(self.notices)))

    def _notice(self, notice: tuple[Incarnation, Incarnation]) -> None:
        who, whom = notice
        worker = self.workers[who[0]]
        # A call may be served just after the loss of its caller was noticed. Other messages are checked before.
        self.flights = [
            flight
            for flight in self.flights
            if (flight.target, flight.source) != (who, whom)
            or (isinstance(flight.what, Create | ForkData) and self.random.random() < 0.5)
        ]
        worker.gone.add(whom[0])
        self.do(worker, worker.rules.worker_lost(whom[0], whom[1]))

    @rule(which=st.integers(0, 60))
    def restart(self, which: int) -> None:
        dead = sorted(set(self.incarnations) - set(self.workers))
        if not dead:
            return
        number = dead[which % len(dead)]
        for notice in [notice for notice in self.notices if notice[1][0] == number]:
            self.notices.remove(notice)
            self._notice(notice)
        self.flights = [flight for flight in self.flights if flight.source[0] != number]
        self.incarnations[number] += 1
        again = self.workers[number] = Worker((number, self.incarnations[number]))
        again.gone = set(self.incarnations) - set(self.workers)
        for worker in self.workers.values():
            worker.gone.discard(number)

    # -- invariants -----------------------------------------------------------------------------------------------

    @invariant()
    def every_reachable_value_exists(self) -> None:
        coming = {(flight.target, flight.what.rref) for flight in self.flights if isinstance(flight.what, Create)}
        named = self.handles + [flight.handle for flight in self.flights if flight.handle is not None]
        for handle in named:
            if not self.alive(handle.owner) or not all(map(self.alive, handle.trust)):
                continue
            if handle.owner[1] != handle.rref[2]:
                continue  # of a previous incarnation of its owner
            assert handle.fork not in self.void or handle.trust, f"{handle} was refused without a reason"
            if handle.fork in self.void:
                continue
            value = handle.owner, handle.rref
            if value in self.orphans:
                # The creator was lost before its call arrived.
                assert not self.alive((handle.rref[0], handle.rref[1] >> COUNTER_BITS)), f"{handle} refers to an orphan"
                continue
            creator = handle.rref[0], handle.rref[1] >> COUNTER_BITS
            assert value in self.values or value in coming or not self.alive(creator), f"{handle} refers to nothing"

    def teardown(self) -> None:
        for handle in list(self.handles):
            if self.random.random() < 0.6:
                self._drop(handle)
        self._run_out()
        self._every_handle_has_a_value_or_an_error()
        for handle in list(self.handles):
            self._drop(handle)
        self._run_out()
        assert not self.handles
        for worker in self.workers.values():
            rules = worker.rules
            assert rules.owned() == {}
            assert rules.held_forks() == {}
            assert not rules._parents
            assert not rules._early
            for incarnation, gaps in rules.creations.gaps().items():
                assert not gaps or (incarnation, worker.me) in self.unsent
        assert not self.values
        assert not self.orphans

    def _run_out(self) -> None:
        while True:
            steps: list[Callable[[int], None]] = []
            if self.flights:
                steps += [self.deliver, self.deliver]
            if self.notices:
                steps.append(self.notice)
            if any(worker.computing for worker in self.workers.values()):
                steps.append(self.compute)
            if not steps:
                return
            self.random.choice(steps)(self.random.randrange(1000))
            self.every_reachable_value_exists()

    def _every_handle_has_a_value_or_an_error(self) -> None:
        for handle in self.handles:
            # The owner, or a later incarnation, which may have been asked as well.
            now = self.workers.get(handle.owner[0])
            found = now is not None and (now.me, handle.rref) in self.values | self.orphans
            settled = found or handle.fork in self.void
            assert settled, f"an access through {handle} would wait forever"


TestReferencesTogether = World.TestCase
TestReferencesTogether.settings = settings(max_examples=80, stateful_step_count=50)


def _one_seed(seed: int) -> None:
    random = Random(seed)
    world = World()
    world.begin(random.randint(2, WORKERS), seed)

    def number() -> int:
        return random.randrange(1000)

    weights = {
        world.create: 3,
        world.send_rref: 6,
        world.drop: 3,
        world.compute: 2,
        world.deliver: 10,
        world.notice: 2,
        world.lose: 0.3,
        world.restart: 0.3,
    }
    for step in random.choices(list(weights), list(weights.values()), k=60):
        if step == world.create:
            world.create(number(), number(), random.randrange(6))
        elif step == world.send_rref and world.handles:
            world.send_rref(number(), number(), random.randrange(6), random.random() < 0.5)
        elif step == world.lose and len(world.workers) > 1:
            world.lose(number(), 0)
        elif (
            step == world.restart
            or (step == world.drop and world.handles)
            or (step == world.compute and any(worker.computing for worker in world.workers.values()))
            or (step == world.deliver and world.flights)
            or (step == world.notice and world.notices)
        ):
            step(number())
        world.every_reachable_value_exists()
    world.teardown()


def test_values_live_exactly_as_long_as_they_are_referred_to_in_two_thousand_runs() -> None:
    for seed in range(2000):
        try:
            _one_seed(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_the_rules_tell_who_holds_and_who_owns_a_fork() -> None:
    owner, user = Ownership(0), Ownership(1)
    owner.own((0, 1, 0))
    fork = owner.prepare_fork((0, 1, 0), None, to=1, fork=(0, 2))
    assert owner.holders_of((0, 1, 0)) == {(0, 2): 1}
    assert owner.holders_of((0, 9, 0)) == {}
    user.fork_received(0, fork)
    assert user.owner_of((0, 2)) == 0
    assert user.owner_of((0, 9)) is None
    user.prepare_fork((0, 1, 0), (0, 2), to=0, fork=(1, 7))
    assert user.receiver_of((1, 7)) == 0
    assert user.receiver_of((1, 9)) is None


def test_the_sender_of_a_fork_is_told_if_its_owner_is_lost_only_to_the_receiver() -> None:
    # Otherwise the sender would keep its own fork for ever, and the owner the value.
    sender, receiver = Ownership(1), Ownership(2, is_lost=lambda worker: worker == 0)
    sender.start_creation((1, 1, 0), (1, 2), 0)
    sender.creation_confirmed((1, 2))
    fork = sender.prepare_fork((1, 1, 0), (1, 2), to=2, fork=(1, 3))
    assert receiver.fork_received(1, fork) == [AcceptChild(1, (1, 3)), ForkRefused((1, 3), True)]
    assert sender.drop_fork((1, 2)) == []
    assert sender.child_accepted((1, 3)) == [DeleteFork(0, (1, 1, 0), (1, 2))]


def test_the_sender_of_a_fork_is_told_if_its_owner_is_lost_before_it_answers() -> None:
    sender, receiver = Ownership(1), Ownership(2)
    sender.start_creation((1, 1, 0), (1, 2), 0)
    sender.creation_confirmed((1, 2))
    fork = sender.prepare_fork((1, 1, 0), (1, 2), to=2, fork=(1, 3))
    receiver.fork_received(1, fork)
    assert receiver.worker_lost(0) == [AcceptChild(1, (1, 3)), ForkRefused((1, 3), True)]
