"""The references extension of messages: forks those that leave, takes those that arrive, and stores created values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from telegrad.calls.call import Served
from telegrad.calls.extension import Extension, IncomingMessage, OutgoingMessage
from telegrad.connection.peer_account import PeerAccount
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import LimitExceeded, ProtocolError, ReferenceGone
from telegrad.protocol.creations import creator_of
from telegrad.protocol.ownership_effects import OwnershipEffect
from telegrad.protocol.rref_ids import ForkData
from telegrad.rref.authorization import check_creation, check_received, check_sent
from telegrad.rref.context import RRefContext
from telegrad.rref.handle import RRef
from telegrad.rref.ids import describe, incarnation_of
from telegrad.rref.ordered import OrderedQueue
from telegrad.rref.owner import OwnerValue, storable_error
from telegrad.rref.user_state import UserRRef
from telegrad.wire.messages import Creation, ForkInfo, StreamPosition
from telegrad.wire.reference import Reference

if TYPE_CHECKING:
    from telegrad.rref.manager import RRefManager


class RRefExtension(Extension):
    """Applies the ownership rules to references that messages carry."""

    def __init__(self, context: RRefContext, manager: RRefManager) -> None:
        self._context = context
        self._manager = manager

    def outgoing(self, message: OutgoingMessage) -> None:
        """Fork the references that a message carries."""
        context, to = self._context, message.peer.id
        forks: list[ForkInfo] = []
        try:
            for position, reference in message.encoded.references:
                handle = self._own(reference)
                if context.strict:
                    check_sent(handle._owner, context.me, to, handle)
                from_fork = handle._user.fork if handle._user else None
                with context.lock:
                    if not context.rules.has_handle(handle._id, from_fork):  # another thread has just released it
                        raise handle.released_error()
                    fork = context.rules.prepare_fork(handle._id, from_fork, to=to, fork=context.ids.new_fork())
                forks.append(ForkInfo(position, fork.rref, fork.fork, fork.owner, handle._ordered))
        finally:
            message.forks = tuple(forks)  # even if one failed: `unsent` takes the others back

    def _own(self, handle: Reference) -> RRef[object]:
        assert isinstance(handle, RRef)
        handle._check()
        if handle._manager is not self._manager:
            raise ReferenceGone(
                f"{handle!r} belongs to worker {handle._manager.agent.me.name!r} of this process and cannot be sent by "
                f"worker {self._context.agent.me.name!r}"
            )
        return handle

    def unsent(self, message: OutgoingMessage) -> None:
        """Take the forks of a message back."""
        forks, message.forks = message.forks, ()
        for info in forks:
            with self._context.lock:
                fork = ForkData(info.rref, info.fork, info.owner)
                effects = self._context.rules.cancel_fork(fork, message.peer.id)
            self._context.perform(effects)

    def arrived(self, message: IncomingMessage) -> bool:
        """Create handles for the references that a message brings, and register the one that it creates.

        A request is held back until the owners of all its references have confirmed them.
        """
        if self._context.strict:
            self._check(message)
        if message.creation is not None:
            self._check_creator(message.creation, message.peer)
            self._register(message.creation, message.peer.id)
            if message.served is not None:
                message.served.creates = message.creation.rref
                message.served.on_result = partial(self._store, message.creation)
        if message.forks:
            self._receive(message)
            if message.proceed is not None:
                users = [h._user for _, h in message.references if isinstance(h, RRef) and h._user is not None]
                return self._context.when_settled(users, message.proceed)
        return True

    def _check(self, message: IncomingMessage) -> None:
        """Raise if the message says of references what its sender may not say."""
        context, sender = self._context, message.peer
        with context.lock:
            if message.creation is not None and sender.id != context.me:
                check_creation(context.rules, sender.id, message.creation)
            for fork in message.forks:
                check_received(context.rules, context.me, sender.id, fork)
            if len({fork.fork for fork in message.forks}) < len(message.forks):
                raise ProtocolError(f"worker {sender.name!r} sent one reference twice in a message")

    def check(self, message: IncomingMessage, account: PeerAccount) -> None:
        """Check how many references the sender of a request has here."""
        with self._context.lock:
            wanted = self._context.references_of(message.peer.id) + len(message.forks)
        account.check_count("references", wanted + (message.creation is not None))

    def refused(self, message: IncomingMessage) -> None:
        """Give back the forks of a refused request, and wait neither for its value nor for its place in an order."""
        context, sender, creation = self._context, message.peer.id, message.creation
        if creation is not None:
            self._check_creator(creation, message.peer)
        effects: list[OwnershipEffect] = []
        with context.lock:
            for info in message.forks:
                effects += context.rules.fork_rejected(sender, ForkData(info.rref, info.fork, info.owner))
            if creation is not None and sender != context.me:
                effects += context.rules.creation_refused(creation.rref, creation.fork, creation.after)
                context.expected.remove(creation.rref)
        context.perform(effects)
        if creation is not None:
            context.fail_expected(creation.rref)
        if message.stream_position is not None:
            self.skip(sender, message.stream_position, message.account)

    def _receive(self, message: IncomingMessage) -> None:
        context, sender = self._context, message.peer.id
        for info in message.forks:
            user = None if info.owner == context.me else UserRRef(info.fork)
            handle = self._manager.make_handle(info.rref, user, info.owner, info.ordered)
            with context.lock:
                if user is None:
                    if not context.rules.owns(info.rref):
                        context.expected.add(info.rref, sender)
                    context.values.setdefault(info.rref, OwnerValue(info.ordered))
                else:
                    context.users[info.fork] = user
                effects = context.rules.fork_received(sender, ForkData(info.rref, info.fork, info.owner))
                if user is not None:
                    user.confirmed = user.settled = sender == info.owner
            message.references.append((info.position, handle))
            context.perform(effects)

    def _check_creator(self, creation: Creation, caller: WorkerRecord) -> None:
        rref, context = creation.rref, self._context
        if creator_of(rref) != (caller.id, incarnation_of(caller)) or rref[2] != context.incarnation:
            raise ProtocolError(f"worker {caller.name!r} created {describe(rref)}, which is not one of its references")

    def _register(self, creation: Creation, caller: int) -> None:
        """Expect the value of a reference that a call creates."""
        context = self._context
        if caller == context.me:
            return  # `RRefManager.create` has added it
        with context.lock:
            context.expected.remove(creation.rref)
            owned = context.values.setdefault(creation.rref, OwnerValue())
            if creation.ordered and owned.queue is None:
                owned.queue = OrderedQueue()
            context.rules.creation_received(creation.rref, creation.fork, caller, creation.after)

    def _store(self, creation: Creation, value: object, error: BaseException | None) -> None:
        """Store what the function returned or raised. The caller learns only that it has ended."""
        context = self._context
        with context.lock:
            owned = context.values.get(creation.rref)
        if owned is not None:
            owned.set(value, None if error is None else storable_error(error, context.agent.me.name))
        with context.lock:
            effects = context.rules.value_computed(creation.rref)
        context.perform(effects)

    def answered(self, served: Served) -> None:
        """Let calls that are ordered after this one go on, if it never entered the object's queue."""
        if served.stream_position is not None:
            self.skip(served.worker.id, served.stream_position, served.channel.account)

    def skip(self, caller: int, position: StreamPosition, account: PeerAccount | None, *, last: bool = False) -> None:
        """Do not wait for a call of an ordered object of this worker."""
        try:
            owned = self._context.find_for(caller, position.rref, account)
        except (ReferenceGone, LimitExceeded):  # then no call waits for it
            return

        def skip() -> None:
            if owned.queue is not None and owned.error is None:  # else no call waits in it
                owned.queue.skip(caller, position, last=last)

        if owned.when_ready(skip):
            skip()
