"""The references extension of messages: forks those that leave, takes those that arrive, and stores created values."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from telegrad.calls.call import Served
from telegrad.calls.extension import Extension, IncomingMessage, OutgoingMessage
from telegrad.errors import ReferenceGone
from telegrad.protocol import ownership as protocol
from telegrad.protocol.ownership import Ref
from telegrad.rref.context import RRefContext
from telegrad.rref.handle import RRef, UserRRef
from telegrad.rref.ordered import OrderedQueue
from telegrad.rref.owner import OwnerValue, to_keep
from telegrad.wire.messages import Creation, ForkInfo, Turn
from telegrad.wire.payload import Reference


class Book(Protocol):
    """What makes the handles."""

    def make_handle(self, rref: Ref, use: UserRRef | None, owner: int, ordered: bool) -> Reference:
        """A handle of a reference."""


class RRefExtension(Extension):
    """Keeps the books when references travel."""

    def __init__(self, ledger: RRefContext, book: Book) -> None:
        self._ledger = ledger
        self._book = book

    def outgoing(self, message: OutgoingMessage) -> None:
        """Fork the references that a message carries."""
        ledger, to = self._ledger, message.peer.id
        forks: list[ForkInfo] = []
        try:
            for position, reference in message.encoded.references:
                handle = self._own(reference)
                from_fork = handle._use.fork if handle._use else None
                with ledger.lock:
                    if not ledger.rules.has(handle._id, from_fork):  # another thread released it just now
                        raise handle.released_error()
                    fork = ledger.rules.pass_on(handle._id, from_fork, to=to, fork=ledger.new_fork())
                forks.append(ForkInfo(position, fork.rref, fork.fork, fork.owner, handle._ordered))
        finally:
            message.forks = tuple(forks)  # also if one failed: `unsent` takes the others back

    def _own(self, handle: Reference) -> RRef[object]:
        assert isinstance(handle, RRef)
        handle._check()
        if handle._book is not self._book:
            raise ReferenceGone(
                f"{handle!r} belongs to worker {handle._book.agent.me.name!r}, which lives in this process, too, and "
                f"cannot be sent by worker {self._ledger.agent.me.name!r}"
            )
        return handle

    def unsent(self, message: OutgoingMessage) -> None:
        """Take the forks of a message back."""
        forks, message.forks = message.forks, ()
        for info in forks:
            with self._ledger.lock:
                effects = self._ledger.rules.not_sent(protocol.Fork(info.rref, info.fork, info.owner), message.peer.id)
            self._ledger.carry_out(effects)

    def arrived(self, message: IncomingMessage) -> bool:
        """Take the references that a message brings, and note the one that it creates.

        A request is held back until the owners of all its references have confirmed them.
        """
        if message.creation is not None:
            self._create(message.creation, message.peer.id)
            if message.served is not None:
                message.served.on_result = partial(self._computed, message.creation)
        if message.forks:
            self._receive(message)
            if message.proceed is not None:
                uses = [h._use for _, h in message.references if isinstance(h, RRef) and h._use is not None]
                return self._ledger.when_settled(uses, message.proceed)
        return True

    def _receive(self, message: IncomingMessage) -> None:
        ledger, sender = self._ledger, message.peer.id
        for info in message.forks:
            use = None if info.owner == ledger.me else UserRRef(info.fork)
            handle = self._book.make_handle(info.rref, use, info.owner, info.ordered)
            with ledger.lock:
                if use is None:
                    ledger.kept.setdefault(info.rref, OwnerValue(info.ordered))
                else:
                    ledger.uses[info.fork] = use
                effects = ledger.rules.received(sender, protocol.Fork(info.rref, info.fork, info.owner))
                if use is not None:
                    use.confirmed = use.settled = sender == info.owner
            message.references.append((info.position, handle))
            ledger.carry_out(effects)

    def _create(self, creation: Creation, caller: int) -> None:
        ledger = self._ledger
        if caller == ledger.me:
            return  # it is here since the call was made
        with ledger.lock:
            kept = ledger.kept.setdefault(creation.rref, OwnerValue())
            if creation.ordered and kept.mailbox is None:
                kept.mailbox = OrderedQueue()
            ledger.rules.created(creation.rref, creation.fork, caller, creation.after)

    def _computed(self, creation: Creation, value: object, error: BaseException | None) -> None:
        """Store what the function returned or raised. The caller gets nothing but the news that it has ended."""
        ledger = self._ledger
        with ledger.lock:
            kept = ledger.kept.get(creation.rref)
        if kept is not None:
            kept.set(value, None if error is None else to_keep(error, ledger.agent.me.name))
        with ledger.lock:
            effects = ledger.rules.computed(creation.rref)
        ledger.carry_out(effects)

    def answered(self, served: Served) -> None:
        """Let the calls that wait for this one in an object's order go on, if it never took its turn."""
        if served.turn is not None:
            self.skip(served.worker.id, served.turn)

    def skip(self, caller: int, turn: Turn, *, last: bool = False) -> None:
        """A call of an ordered object that lives here will not come."""
        try:
            kept = self._ledger.find_for(caller, turn.rref)
        except ReferenceGone:  # then nobody waits for the turn
            return

        def skip() -> None:
            if kept.mailbox is not None:
                kept.mailbox.skip(caller, turn, last=last)

        if kept.when_ready(skip):
            skip()
