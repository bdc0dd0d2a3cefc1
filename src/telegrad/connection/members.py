"""The membership of the group, under one lock, and those who want to know when it changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.packed_group import PackedGroup
from telegrad.connection.worker_record import WorkerRecord
from telegrad.protocol.membership import Admission, Identity, Member, Membership, State, Vote
from telegrad.waiting import Event

_log = logging.getLogger("telegrad")

LossCallback = Callable[[Member, str], None]


class Described(Protocol):
    """A WorkerRecord, a Hello, or an Identity."""

    @property
    def name(self) -> str: ...
    @property
    def id(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def generation(self) -> int: ...


def identity_of(worker: Described) -> Identity:
    """Return the part of a record or Hello that membership is about."""
    return Identity(worker.name, worker.id, worker.incarnation, worker.generation)


class _Formed:
    """The members of a packed group, for `Membership.form`."""

    def __init__(self, group: PackedGroup) -> None:
        self._group = group

    def find(self, name: str) -> Identity | None:
        record = self._group.find(name)
        return None if record is None else identity_of(record)

    def __iter__(self) -> Iterator[Identity]:
        return map(identity_of, self._group)


class Members:
    """The group as this worker knows it; see `telegrad.protocol.membership`."""

    def __init__(self, local: LocalWorker) -> None:
        self._local = local
        self._lock = threading.Lock()  # protects all below
        self._membership: Membership | None = None
        self._waiting: list[tuple[str, Event]] = []
        self._callbacks: list[LossCallback] = []

    def _get(self) -> Membership:
        membership = self._membership
        if membership is None:
            membership = self._membership = Membership(identity_of(self._local.me), self._local.runtime.now())
        return membership

    def form(self, records: Iterable[WorkerRecord], *, is_open: bool) -> None:
        """Start with these workers, which include this one."""
        now = self._local.runtime.now()
        with self._lock:
            membership = Membership(identity_of(self._local.me), now, is_open=is_open)
            self._membership = membership
            if isinstance(records, PackedGroup):
                membership.form(_Formed(records))
                return
            for record in records:
                membership.add(identity_of(record), now)

    # -- reading ----------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether workers with new names may join."""
        with self._lock:
            return self._get().is_open

    def all(self) -> list[Member]:
        """Return all members, by id."""
        with self._lock:
            return self._get().members()

    def find(self, name: str) -> Member | None:
        """Return the latest incarnation of a worker."""
        with self._lock:
            return self._get().find(name)

    def state_of(self, record: WorkerRecord) -> State:
        """Return what this worker holds an incarnation for: lost if another one has taken its place."""
        member = self.find(record.name)
        return State.LOST if member is None or member.identity.incarnation != record.incarnation else member.state

    def known_generation(self, identity: Identity) -> int:
        """See `Membership.known_generation`."""
        with self._lock:
            return self._get().known_generation(identity)

    def votes(self) -> dict[str, Vote]:
        """Return for whom this worker has voted."""
        with self._lock:
            return self._get().votes()

    def is_quorum(self, newcomer: str, voters: Collection[str]) -> bool:
        """Return whether the votes of these members suffice for a newcomer."""
        with self._lock:
            return self._get().is_quorum(newcomer, voters)

    # -- changing ---------------------------------------------------------------------------------------------

    def admit(self, identity: Identity) -> Admission:
        """Decide about a worker that connects. Raises NotAdmitted."""
        with self._lock:
            return self._get().admit(identity, self._local.runtime.now())

    def vote(self, identity: Identity) -> str:
        """Vote for a newcomer. Returns why not, or nothing."""
        with self._lock:
            return self._get().vote(identity, self._local.runtime.now())

    def learn(self, record: WorkerRecord) -> Admission:
        """Take over what another member says about a worker; see `Membership.learn`."""
        with self._lock:
            return self._get().learn(identity_of(record), self._local.runtime.now())

    def merge_votes(self, votes: Sequence[tuple[str, Vote]]) -> None:
        """Take over for whom another member has voted."""
        with self._lock:
            self._get().merge(votes)

    @property
    def may_vote(self) -> bool:
        """Whether this worker may vote; see `Membership.may_vote`."""
        with self._lock:
            return self._get().may_vote

    def set_voting(self, may_vote: bool) -> None:
        """Set whether this worker may vote."""
        with self._lock:
            self._get().may_vote = may_vote

    def gone(self, worker: Described, reason: str, *, left: bool) -> None:
        """Record that a worker was lost or has left, and tell those who want to know of losses."""
        with self._lock:
            membership = self._get()
            state = State.LEFT if left else State.LOST
            if not membership.gone(worker.name, worker.incarnation, state, self._local.runtime.now()):
                return
            member = membership.find(worker.name)
            callbacks = list(self._callbacks)
        assert member is not None
        if left or self._local.closed or self._local.departing:
            return
        for callback in callbacks:
            self._local.executor.submit(partial(_notify, callback, member, reason))

    # -- watching ---------------------------------------------------------------------------------------------

    def announce(self, name: str) -> None:
        """Wake those who wait for a worker that is there now."""
        with self._lock:
            events = [event for wanted, event in self._waiting if wanted == name]
        for event in events:
            event.set()

    def wake_all(self) -> None:
        """Wake all who wait for a worker, because this one was closed."""
        with self._lock:
            events = [event for _, event in self._waiting]
        for event in events:
            event.set()

    def wait_for(self, name: str, deadline: float | None, incarnation: int | None = None) -> bool:
        """Wait until worker `name` is alive; False if the deadline passes first, or this worker is closed.

        With an `incarnation`, only that one counts.
        """
        while True:
            waiting = name, self._local.runtime.event()
            with self._lock:
                self._waiting.append(waiting)
            try:
                member = self.find(name)
                is_alive = member is not None and member.state is State.ALIVE
                if member is not None and is_alive and incarnation in (None, member.identity.incarnation):
                    return True
                if self._local.closed or not self._wait(name, waiting[1], deadline):
                    return False
            finally:
                with self._lock:
                    self._waiting.remove(waiting)

    def _wait(self, name: str, event: Event, deadline: float | None) -> bool:
        waits = self._local.waits
        key = waits.enter("member", (name,), lambda: f"worker {name!r} to join")
        try:
            return self._local.executor.wait(event, deadline)
        finally:
            waits.leave(key)

    def on_lost(self, callback: LossCallback) -> Callable[[], None]:
        """Call `callback` on a worker thread for every worker that is lost. Returns a function that ends this."""
        with self._lock:
            self._callbacks.append(callback)

        def remove() -> None:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return remove


def _notify(callback: LossCallback, member: Member, reason: str) -> None:
    try:
        callback(member, reason)
    except BaseException:  # noqa: BLE001 - of the user's function, which nobody waits for; this thread has other tasks
        _log.exception("a callback for lost workers failed for worker %r", member.identity.name)
