"""The ownership bookkeeping of one agent: the values it owns, and the references it uses.

`telegrad.protocol.ownership` decides what has to happen; `RRefContext` does it. `telegrad.rref.fork_messages` takes the
messages of other workers.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from telegrad import events
from telegrad.agent.agent import Agent
from telegrad.agent.shutdown import RRefMessageCounts
from telegrad.connection.peer_account import PeerAccount
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import ReferenceGone, UnknownWorker
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
from telegrad.protocol.rref_ids import COUNTER_BITS, ForkId, RRefId
from telegrad.rref.expected_values import ExpectedValues
from telegrad.rref.ids import NewIds, describe, incarnation_of
from telegrad.rref.owner import OwnerValue
from telegrad.rref.user_state import UserRRef
from telegrad.wire.messages import RRefChildAccept, RRefForkAccept, RRefForkRequest, RRefUserDelete

_log = logging.getLogger("telegrad")

_UNKNOWN = "worker {!r} does not have it, because its last user was lost, or an earlier process of that name had it"


class RRefContext:
    """Owner values by reference id and user references by fork id, kept in step with the other workers."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.me = agent.me.id
        self.incarnation = incarnation_of(agent.me)
        self.strict = agent.registry is not None
        """Registered mode: what other workers say is checked as `telegrad.rref.authorization` describes."""
        self.lock = threading.Lock()  # protects all below
        self.rules = Ownership(self.me, self._is_gone, self.incarnation)
        self.values: dict[RRefId, OwnerValue] = {}
        self.users: dict[ForkId, UserRRef] = {}
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self.expected = ExpectedValues()
        self.ids = NewIds(agent.me)
        agent.on_lost(self._on_lost, lambda: not self.values and not self.users)

    def _is_gone(self, worker: int) -> bool:
        if worker == self.me:
            return False
        try:
            return bool(self.agent.peers.find(worker).gone)
        except UnknownWorker:  # lost before this worker started
            return True

    def name_of(self, worker: int) -> str:
        """Return a worker's name, or its number if the name is unknown."""
        try:
            return self.agent.peers.find(worker).record.name
        except UnknownWorker:
            return f"number {worker}"

    # -- values and users -------------------------------------------------------------------------------------------

    def find(self, rref: RRefId) -> OwnerValue:
        """Return the value of a reference that this worker owns. The value may not be computed yet."""
        with self.lock:
            value = self.values.get(rref)
        if value is None:
            raise self._no_value(rref)
        return value

    def _no_value(self, rref: RRefId) -> ReferenceGone:
        return ReferenceGone(
            f"{describe(rref)} has no value on worker {self.agent.me.name!r}: it was released, or the workers that "
            "held it are lost"
        )

    def find_for(self, caller: int, rref: RRefId, account: PeerAccount | None) -> OwnerValue:
        """Return the value that `caller` asks for. Its creator may ask before the call that computes it arrives.

        Raises LimitExceeded if the caller, whose account this is, has too many references.
        """
        with self.lock:
            value = self.values.get(rref)
            if self.strict and value is not None and caller != self.me and not self._may_use(caller, rref):
                value = None
            if (value is None or not value.ready) and rref[0] == caller and self.rules.is_pending(rref):
                if value is None:
                    self.check_references(caller, account)
                    value = self.values[rref] = OwnerValue()
                    self.expected.add(rref, caller)
                value.awaited = True
        if value is None:
            raise self._no_value(rref)
        return value

    def _may_use(self, caller: int, rref: RRefId) -> bool:
        return caller in self.rules.holders_of(rref).values() or (rref[0] == caller and self.rules.is_pending(rref))

    def references_of(self, worker: int) -> int:
        """Return how many references this worker keeps something for because of another. Call with the lock held."""
        return self.rules.references_of(worker) + self.expected.count(worker)

    def check_references(self, worker: int, account: PeerAccount | None) -> None:
        """Raise LimitExceeded if a worker would have too many references here with one more."""
        if account is not None:
            account.check_count("references", self.references_of(worker) + 1)

    def settle(self, user: UserRRef) -> None:
        """Record that the owner has confirmed a fork, or never will, and run the callbacks that wait for it."""
        with self.lock:
            user.settled = True
            waiters, user.waiters = user.waiters, []
        for waiter in waiters:
            waiter()

    def when_settled(self, users: Sequence[UserRRef], action: Callable[[], None]) -> bool:
        """Return whether all these are settled. If not, `action` is called once they are."""
        with self.lock:
            pending = [user for user in users if not user.settled]
            left = len(pending)

            def settled() -> None:
                nonlocal left
                with self.lock:
                    left -= 1
                    last = left == 0
                if last:
                    action()

            for user in pending:
                user.waiters.append(settled)
        return not pending

    # -- effects ----------------------------------------------------------------------------------------------------

    def perform(self, effects: Sequence[OwnershipEffect]) -> None:
        """Perform the effects that the rules returned. The caller does not hold the lock."""
        for effect in effects:
            match effect:
                case RequestFork(to, rref, fork):
                    self._send(to, RRefForkRequest(rref, fork))
                case AcceptFork(to, fork, refused):
                    self._send(to, RRefForkAccept(fork, refused))
                case AcceptChild(to, fork):
                    self._send(to, RRefChildAccept(fork))
                case DeleteFork(to, rref, fork):
                    self.record(rref, "released", self.name_of(to))
                    self._send(to, RRefUserDelete(rref, fork))
                case ValueFreed(rref):
                    with self.lock:
                        value = self.values.pop(rref, None)
                    self.record(rref, "freed")
                    del value  # without the lock: the user's object may have a destructor
                case ValueOrphaned(rref):
                    self._fail_orphan(rref)
                case ValueUnknown(rref):
                    self._fail_orphan(rref, _UNKNOWN.format(self.agent.me.name))
                case ForkConfirmed(fork) | ForkRefused(fork):
                    self._settle_fork(fork, effect)

    def record(self, rref: RRefId, what: str, peer: str = "") -> None:
        """Record what happened to a reference."""
        ring, now = self.agent.local.events, self.agent.runtime.now()
        ring.record(events.REFERENCE, now, now, rref[1], peer=peer, what=f"{what}: {describe(rref)}")

    def _send(self, to: int, head: Any) -> None:
        with self.lock:
            self._sent[to] += 1
        self.agent.tell(to, head)

    def _fail_orphan(self, rref: RRefId, why: str = "the worker that created it is lost") -> None:
        with self.lock:
            value = self.values.get(rref)
        if value is not None:
            value.set(None, ReferenceGone(f"{describe(rref)} will never have a value: {why}"))

    def fail_expected(self, rref: RRefId) -> None:
        """Fail everybody who waits for a value whose creation was refused."""
        self._fail_orphan(rref, "the call that creates it was refused")
        with self.lock:
            if not self.rules.owns(rref):
                self.values.pop(rref, None)

    def _settle_fork(self, fork: ForkId, effect: ForkConfirmed | ForkRefused) -> None:
        with self.lock:
            user = self.users.get(fork)
        if user is None:
            return
        if isinstance(effect, ForkConfirmed):
            user.confirmed = True
        elif effect.owner_lost:
            user.owner_lost = True
        else:
            user.refused = True
        self.settle(user)

    def forget_unexpected(self, rref: RRefId) -> None:
        """Drop the entry of a value that is not computed, and that nobody refers to. Call with the lock held.

        The call that computes it may still come, and makes another. But if its creator waits for it, it is kept.
        """
        value = self.values.get(rref)
        if value is not None and not (value.ready or value.awaited or self.rules.owns(rref)):
            del self.values[rref]
            self.expected.remove(rref)

    def _on_lost(self, record: WorkerRecord, reason: str) -> None:
        incarnation = incarnation_of(record)
        with self.lock:
            effects = self.rules.worker_lost(record.id, incarnation)
            expected = [
                rref
                for rref, value in self.values.items()
                if not self.rules.owns(rref)
                and (
                    (rref[0], rref[1] >> COUNTER_BITS) == (record.id, incarnation)
                    or not (value.ready or value.awaited)  # the lost worker was the last that referred to it
                )
            ]
            queues = [value.queue for value in self.values.values() if value.queue is not None]
            self.ids.owner_lost(record)
            del self._sent[record.id], self._received[record.id]
        for queue in queues:
            queue.caller_lost(record.id, incarnation)
        self.perform(effects)
        for rref in expected:
            self._fail_orphan(rref)
            with self.lock:
                self.values.pop(rref, None)
                self.expected.remove(rref)

    def count_received(self, sender: int) -> None:
        """Count a message about references that was handled, for the rounds of a shutdown."""
        with self.lock:
            self._received[sender] += 1

    def message_counts(self, pending: bool) -> RRefMessageCounts:
        """Return how many messages about references were sent and received, for the rounds of a shutdown."""
        with self.lock:
            return RRefMessageCounts(pending, dict(self._sent), dict(self._received))
