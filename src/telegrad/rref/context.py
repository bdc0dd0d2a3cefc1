"""The books of one agent's references: the rules, what they are about, and the messages that they send and get.

`telegrad.protocol.ownership` has the rules; this carries out what they say.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.calls.keeper import Traffic
from telegrad.connection.channel import Channel
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
)
from telegrad.protocol.rref_ids import COUNTER_BITS, ForkId, RRefId
from telegrad.rref.handle import UserRRef
from telegrad.rref.owner import OwnerValue, show
from telegrad.wire.frames import Message
from telegrad.wire.messages import RRefChildAccept, RRefForkAccept, RRefForkRequest, RRefUserDelete

_LIFE_MASK = (1 << 23) - 1


def life_of(record: WorkerRecord) -> int:
    """What the ids begin with that a worker makes in this life of it."""
    return record.incarnation & _LIFE_MASK


class RRefContext:
    """Values by their references, uses by their forks, and who must hear of what happens to them."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.me = agent.me.id
        self.life = life_of(agent.me)
        self.lock = threading.Lock()  # protects all below
        self.rules = Ownership(self.me, self._is_gone, self.life)
        self.kept: dict[RRefId, OwnerValue] = {}
        self.uses: dict[ForkId, UserRRef] = {}
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._numbers = itertools.count()  # of references and forks
        self._latest: dict[ForkId, int] = {}  # by owner and its life: the number of the last reference we created there
        self._listen(RRefForkRequest, self._requested)
        self._listen(RRefForkAccept, lambda _, head: self.rules.fork_accepted(head.fork, refused=head.refused))
        self._listen(RRefChildAccept, lambda _, head: self.rules.child_accepted(head.fork))
        self._listen(RRefUserDelete, lambda sender, head: self.rules.fork_deleted(sender, head.rref, head.fork))
        agent.on_lost(self._on_lost)

    def _is_gone(self, worker: int) -> bool:
        if worker == self.me:
            return False
        try:
            return bool(self.agent.peers.find(worker).gone)
        except UnknownWorker:  # lost before this worker was started
            return True

    def name_of(self, worker: int) -> str:
        """A worker's name, as far as it is known."""
        try:
            return self.agent.peers.find(worker).record.name
        except UnknownWorker:
            return f"number {worker}"

    # Both are called with the lock held.

    def new_fork(self) -> ForkId:
        """An id for a fork."""
        return self.me, self.life << COUNTER_BITS | next(self._numbers)

    def new_rref(self, owner: WorkerRecord) -> tuple[RRefId, int]:
        """An id for a reference that is to be created, and the number of the one before it on the same owner, or -1."""
        life = life_of(owner)
        number = next(self._numbers)
        after = self._latest.get((owner.id, life), -1)
        self._latest[owner.id, life] = number
        return (self.me, self.life << COUNTER_BITS | number, life), after

    # -- values and uses --------------------------------------------------------------------------------------------

    def find(self, rref: RRefId) -> OwnerValue:
        """A value that lives here, or is being made, or is to come."""
        with self.lock:
            kept = self.kept.get(rref)
        if kept is None:
            raise self._gone(rref)
        return kept

    def _gone(self, rref: RRefId) -> ReferenceGone:
        return ReferenceGone(
            f"{show(rref)} names nothing on worker {self.agent.me.name!r} (any more): it was released, or the workers "
            "that held it are lost"
        )

    def find_for(self, caller: int, rref: RRefId) -> OwnerValue:
        """The same; but its creator may use a reference before the call that makes the value has come."""
        with self.lock:
            kept = self.kept.get(rref)
            if kept is None and rref[0] == caller and self.rules.is_pending(rref):
                kept = self.kept[rref] = OwnerValue()
        if kept is None:
            raise self._gone(rref)
        return kept

    def settle(self, use: UserRRef) -> None:
        """It is known whether the owner knows of a fork."""
        with self.lock:
            use.settled = True
            waiters, use.waiters = use.waiters, []
        for waiter in waiters:
            waiter()

    def when_settled(self, uses: Sequence[UserRRef], action: Callable[[], None]) -> bool:
        """Whether that is known of all these; if not, `action` is called when it is."""
        with self.lock:
            unknown = [use for use in uses if not use.settled]
            left = len(unknown)

            def settled() -> None:
                nonlocal left
                with self.lock:
                    left -= 1
                    last = left == 0
                if last:
                    action()

            for use in unknown:
                use.waiters.append(settled)
        return not unknown

    # -- effects ----------------------------------------------------------------------------------------------------

    def carry_out(self, effects: Sequence[OwnershipEffect]) -> None:
        """Do what the rules say. The lock is not held."""
        for effect in effects:
            match effect:
                case RequestFork(to, rref, fork):
                    self._tell(to, RRefForkRequest(rref, fork))
                case AcceptFork(to, fork, refused):
                    self._tell(to, RRefForkAccept(fork, refused))
                case AcceptChild(to, fork):
                    self._tell(to, RRefChildAccept(fork))
                case DeleteFork(to, rref, fork):
                    self._tell(to, RRefUserDelete(rref, fork))
                case ValueFreed(rref):
                    with self.lock:
                        kept = self.kept.pop(rref, None)
                    del kept  # not under the lock: it may be the user's, with a destructor
                case ValueOrphaned(rref):
                    self._orphan(rref)
                case ForkConfirmed(fork) | ForkRefused(fork):
                    self._decided(fork, effect)

    def _tell(self, to: int, head: Any) -> None:
        with self.lock:
            self._sent[to] += 1
        self.agent.tell(to, head)

    def _orphan(self, rref: RRefId) -> None:
        with self.lock:
            kept = self.kept.get(rref)
        if kept is not None:
            text = f"{show(rref)}: its value will never come, because the worker that was to have it made is lost"
            kept.set(None, ReferenceGone(text))

    def _decided(self, fork: ForkId, effect: ForkConfirmed | ForkRefused) -> None:
        with self.lock:
            use = self.uses.get(fork)
        if use is None:
            return
        if isinstance(effect, ForkConfirmed):
            use.confirmed = True
        elif effect.owner_lost:
            use.lost = True
        else:
            use.given_up = True
        self.settle(use)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _listen(self, kind: type, rule: Callable[[int, Any], list[OwnershipEffect]]) -> None:
        def heard(channel: Channel, head: Any, message: Message) -> None:
            with self.lock:
                if channel.session.state.is_over:
                    return  # its sender is given up, and may have been started again
                sender = channel.worker.id
                effects = rule(sender, head)
            self.carry_out(effects)
            with self.lock:
                self._received[sender] += 1

        self.agent.handle(kind, heard, urgent=True)

    def _requested(self, sender: int, head: RRefForkRequest) -> list[OwnershipEffect]:
        effects = self.rules.fork_requested(sender, head.rref, head.fork)
        if self.rules.owns(head.rref):
            self.kept.setdefault(head.rref, OwnerValue())
        return effects

    def _on_lost(self, record: WorkerRecord, reason: str) -> None:
        life = life_of(record)
        with self.lock:
            effects = self.rules.worker_lost(record.id, life)
            expected = [
                rref
                for rref in self.kept
                if not self.rules.owns(rref) and (rref[0], rref[1] >> COUNTER_BITS) == (record.id, life)
            ]
            mailboxes = [kept.mailbox for kept in self.kept.values() if kept.mailbox is not None]
            self._latest.pop((record.id, life), None)
            del self._sent[record.id], self._received[record.id]
        for mailbox in mailboxes:
            mailbox.lost(record.id, life)
        self.carry_out(effects)
        for rref in expected:
            self._orphan(rref)
            with self.lock:
                self.kept.pop(rref, None)

    def traffic(self, pending: bool) -> Traffic:
        """See `Keeper.traffic`."""
        with self.lock:
            return Traffic(pending, dict(self._sent), dict(self._received))
